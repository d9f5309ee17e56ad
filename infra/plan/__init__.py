"""Pure plans: what AWS gets for a description, decided without a cloud SDK."""
