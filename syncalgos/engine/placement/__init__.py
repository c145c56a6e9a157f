"""Places of workers: their devices, the arrays on them, and the maps over them."""
