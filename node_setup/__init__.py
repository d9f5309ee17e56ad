"""Node tuning: facts, a plan, its apply and facts again, over SSH and at every boot."""
