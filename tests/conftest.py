"""Three virtual CPU devices for every test that runs in this process.

Programs here are small and run once or twice: compiled without optimization, the suite
takes half as long. The command line's own processes compile as users' do.
"""

import gc
import itertools
import os

import jax
import pytest

QUICK = ["--xla_backend_optimization_level=0"]
if jax.__version_info__ < (0, 11):  # later versions refuse to start with it
    QUICK.append("--xla_cpu_use_fusion_emitters=false")

# Before the user's own, which win; a backend reads them when it starts.
os.environ["XLA_FLAGS"] = " ".join([*QUICK, os.environ.get("XLA_FLAGS", "")])
jax.config.update("jax_num_cpu_devices", 3)

# Here and in other processes: the cache is the user's, and tests share few programs.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
jax.config.update("jax_enable_compilation_cache", False)


pytest.register_assert_rewrite("quadratics")  # its assertions tell their values
TESTS = itertools.count(1)


@pytest.fixture(autouse=True)
def few_programs_are_kept():
    """Linux maps 65,530 areas into a process, and every program takes some hundred."""
    yield
    if next(TESTS) % 50 == 0:
        jax.clear_caches()
        gc.collect()
