"""Sweeps: one run for each combination of values of some settings, under one folder."""
