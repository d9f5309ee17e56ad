"""Registries: credentials, reads, pushes and tags."""
