"""A slow link between two processes."""
