"""Starts runs on a described cluster, starts them again, and tells how they are; on the operator's side."""
