"""The data pipeline: which examples a run sees, and when."""
