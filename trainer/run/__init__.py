"""The life of a run: its start, what each launch saves, the journal of its launches, the memory that it needs, text from its
weights."""
