"""A run of the agent: plan, apply, read again."""
