"""From the files of the runs to figures and sentences."""
