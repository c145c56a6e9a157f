"""Processes started elsewhere, and connected only by jax.distributed."""
