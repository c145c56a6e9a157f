"""Data sets: downloaded once, checked against pins.toml, read as NumPy arrays."""
