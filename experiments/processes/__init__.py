"""Starts and joins the processes that make a run together."""
