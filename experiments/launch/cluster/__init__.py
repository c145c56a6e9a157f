"""Dask clusters: the workers of a scheduler, and what runs on them."""
