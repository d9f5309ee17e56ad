"""Building with buildx, from a plan to a record."""
