"""Places of workers: their devices, arrays on these, and programs mapped over them."""
