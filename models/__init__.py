"""Models as plain functions: `init` makes params, `apply` uses them.

They import nothing of strategies or tasks.
"""
