"""Comparisons of syncalgos with its peers."""
