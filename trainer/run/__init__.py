"""The life of a run: its start, what each attempt saves, the memory that it needs, text from its weights."""
