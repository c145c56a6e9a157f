"""Makes a page, pictures and tables from figures and sentences."""
