"""Lanes, the workers of one device: the forms in which a device runs them."""
