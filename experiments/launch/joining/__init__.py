"""Joins the processes of a run by jax.distributed alone."""
