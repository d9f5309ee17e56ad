"""Containers in the lab: an engine, a BuildKit, a registry, and what is built and run with them."""
