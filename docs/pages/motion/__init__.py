"""Animations of workers on a loss of two parameters."""
