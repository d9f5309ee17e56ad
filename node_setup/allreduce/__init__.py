"""The all-reduce of a fleet by nccl-tests, and the search for the node that slows it."""
