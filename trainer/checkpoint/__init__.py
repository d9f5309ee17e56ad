"""Crash-consistent checkpoints: staged in shared memory, written by a torch-free process, committed by one conditional put.

`FORMAT.md` beside this file is the layout on storage; `save/saver.py` and `save/commit.py` are the protocol.
"""
