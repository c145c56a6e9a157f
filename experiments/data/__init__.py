"""Data sets: downloaded once, checked against their pins, read as NumPy arrays."""
