"""One run: its settings, its set-up, and the loop."""
