"""The shipped models: plain modules that know nothing of the loop, of ranks or of checkpoints."""
