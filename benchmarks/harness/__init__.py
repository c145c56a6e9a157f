"""Timings of commands and of studies by jobs; figures and tables of docs/studies."""
