"""How a device runs the workers that it carries."""
