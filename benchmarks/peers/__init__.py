"""syncalgos beside its peers."""
