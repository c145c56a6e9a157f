"""Processes that others start, and that jax.distributed alone connects."""
