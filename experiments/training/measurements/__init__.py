"""What is measured of a run besides its losses."""
