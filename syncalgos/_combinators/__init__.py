"""Combinators: strategies made from other strategies."""
