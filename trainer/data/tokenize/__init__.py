"""`python -m trainer tokenize`: from text to a token set, by processes, restartable after any end.

- `cli`: options and report; `make`: the job from its first look at the input to the index
- `inputs`, `assembly`: which bytes make a chunk, which chunks make a shard (plans)
- `job`, `documents`, `chunks`: the work and its processes
"""
