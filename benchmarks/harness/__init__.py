"""Timings of the commands: their start-up, and studies by jobs."""
