"""Starts, watches and restarts the processes of a run; knows nothing of training."""
