"""Starts and joins the processes that train together."""
