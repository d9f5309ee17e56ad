"""The trainer's container image: what is in it, how it is built, and how it gets to a registry by digest."""
