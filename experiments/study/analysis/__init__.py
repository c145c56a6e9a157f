"""Figures and sentences of a study, from the files of its runs."""
