"""What one node of a job runs: the launcher, which starts its ranks and watches over them."""
