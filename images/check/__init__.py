"""Images in a registry: whether one is in order, what it holds, how two differ."""
