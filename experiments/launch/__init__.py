"""Starts the processes of a run from a command."""
