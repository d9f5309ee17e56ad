"""Starts runs on a cluster, starts them again, and shows their state; the operator's side."""
