"""Makes the runs of a study: in this process, or by jobs on a Dask cluster."""
