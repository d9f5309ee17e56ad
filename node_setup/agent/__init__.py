"""The agent, which runs on a node: standard library only, Python 3.9 and later, packed into one file."""
