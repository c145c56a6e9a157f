"""The engine: runs one strategy on many workers."""
