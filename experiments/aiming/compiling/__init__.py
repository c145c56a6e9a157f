"""Lowers and compiles programs, each in a separate process."""
