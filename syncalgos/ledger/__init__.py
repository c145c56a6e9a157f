"""What each worker sends: the bytes and calls of a traced program."""
