"""An engine, a builder, a registry and a base image on one machine, and containers that run in it."""
