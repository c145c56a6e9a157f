"""From figures and sentences to a page, pictures and tables."""
