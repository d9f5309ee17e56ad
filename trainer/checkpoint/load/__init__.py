"""Verified reading: parts, tensors, the newest whole checkpoint, its export."""
