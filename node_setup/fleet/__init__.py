"""The operator's side: the nodes, the connections to them, and runs over many nodes at once."""
