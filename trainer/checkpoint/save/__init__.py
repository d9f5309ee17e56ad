"""Saving beside the training: staging, the writer process, the vote of the ranks, the commit."""
