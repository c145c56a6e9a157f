"""Places of workers: their devices, and how their arrays lie on them."""
