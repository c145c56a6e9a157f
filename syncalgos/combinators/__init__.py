"""Strategies made of strategies."""
