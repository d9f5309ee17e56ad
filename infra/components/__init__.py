"""Pulumi components: thin, typed arguments only; what AWS wants is decided in `infra.plan`."""
