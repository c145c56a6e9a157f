"""The data pipeline: the examples of a run, and their order."""
