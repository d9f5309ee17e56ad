"""What a training would need before it is started: memory, step time, goodput and cost, by pure functions of data."""
