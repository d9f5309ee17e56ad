"""Registries: credentials, reads, pushes and merges."""
