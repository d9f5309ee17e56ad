"""Node tuning: facts in, a plan out, applied and read again, over SSH and at every boot."""
