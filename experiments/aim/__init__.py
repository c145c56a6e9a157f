"""Asks the real compilers what a run will take on machines that are not there."""
