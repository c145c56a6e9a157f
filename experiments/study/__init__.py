"""Studies: several algorithms and seeds on the same batches, and their report."""
