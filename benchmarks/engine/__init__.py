"""Timings of single parts of the engine."""
