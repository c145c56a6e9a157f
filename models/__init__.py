"""Models as plain functions: `init` makes params, `apply` uses them.

They know nothing of strategies or tasks.
"""
