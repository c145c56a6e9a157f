"""Lowers and compiles programs, each in a process of its own."""
