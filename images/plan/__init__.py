"""What is built, from what, under which name: decided without an engine or a registry."""
