"""Makes a run from a command."""
