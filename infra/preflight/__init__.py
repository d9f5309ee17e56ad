"""Rules that find mistakes in a cluster's description before anything is created."""
