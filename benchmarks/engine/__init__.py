"""Parts of the engine, timed apart."""
