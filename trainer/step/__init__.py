"""The parts of one training step: optimizer, learning rate, number formats, recomputed activations."""
