"""Train a model on spot capacity without losing work; imports nothing heavy, so that the checkpoint writer stays torch-free."""

__version__ = "0.1.0"
