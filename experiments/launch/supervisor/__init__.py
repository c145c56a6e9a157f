"""Starts, watches and restarts processes; imports no jax."""
