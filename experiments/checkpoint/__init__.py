"""Checkpoints: files of shards, and how a run resumes from them."""
