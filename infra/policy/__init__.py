"""The policy pack: what no stack of this project may declare, checked by the engine."""
