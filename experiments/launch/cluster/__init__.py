"""Dask clusters: connects to a scheduler, and runs processes on its workers."""
