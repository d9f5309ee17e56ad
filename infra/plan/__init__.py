"""From wishes to what AWS accepts: pure functions over data, without any cloud SDK."""
