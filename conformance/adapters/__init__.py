"""Other projects' implementations on the vectors, a file for each project.

A file imports its project at the top, and has a `PROJECT` with the rows that
`conformance.matrix` runs. They share `rows`, `local_steps`, `torch_models` and
`processes`.
"""
