"""Data: downloads, formats, text as tokens, and the examples of each step."""
