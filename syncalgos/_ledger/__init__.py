"""The ledger: counts each worker's bytes and calls from a traced program."""
