"""The ledger: bytes and calls that each worker sends, from a traced program."""
