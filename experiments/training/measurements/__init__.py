"""Measurements of a run: effective learning rate, rounds, displacements."""
