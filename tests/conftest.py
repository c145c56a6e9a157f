"""Three virtual CPU devices for every test that runs in this process."""

import jax

jax.config.update("jax_num_cpu_devices", 3)
