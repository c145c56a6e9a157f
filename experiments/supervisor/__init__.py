"""Starts, watches and restarts the processes of one machine; imports no jax."""
