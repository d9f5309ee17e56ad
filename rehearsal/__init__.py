"""The whole journey on one machine, with real processes and an embedded AWS, before it costs money."""
