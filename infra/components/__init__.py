"""Pulumi components: they make the resources that `infra.plan` decides on."""
