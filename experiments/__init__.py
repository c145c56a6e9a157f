"""The harness: trains any strategy on any task, with the same batches for one seed."""
