"""The operator's side: which nodes there are, the ways to them, and runs over many of them at once."""
