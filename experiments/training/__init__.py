"""One run: its settings, its preparation and the training loop."""
