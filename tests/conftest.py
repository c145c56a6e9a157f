"""Three virtual CPU devices for every test that runs in this process.

Programs here are small and run once or twice: compiled without optimization, the suite
takes half as long. Its processes are, too, but for those that show a user's programs.

All processes of the tests share one folder of compiled programs, which later sessions
find again: a run of the command line takes half as long, and the slow tests use what
the others have compiled.
"""

import gc
import importlib.util
import itertools
import os
import shutil

import hypothesis
import jax
import pytest
from support.commands import PROGRAMS, SHARED

QUICK = ["--xla_backend_optimization_level=0"]
if jax.__version_info__ < (0, 11):  # later versions refuse to start with it
    QUICK.append("--xla_cpu_use_fusion_emitters=false")

# Before the user's own, which win; a backend reads them when it starts.
os.environ["XLA_FLAGS"] = " ".join([*QUICK, os.environ.get("XLA_FLAGS", "")])
jax.config.update("jax_num_cpu_devices", 3)
# libtpu is here for its compiler; with it jax looks for TPUs, and complains of none.
if importlib.util.find_spec("jax_cuda13_plugin") is None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.devices()  # before a run in this process asks for as many as there are cores

# jax is imported, so the environment speaks to other processes alone, and to a run of
# the command line in this one, which then leaves the devices as they are.
os.environ.update(SHARED, JAX_NUM_CPU_DEVICES="3")
jax.config.update("jax_enable_compilation_cache", True)
jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

# As in a jax to come: its default backend and shard_map must do without.
if os.environ.get("SYNCALGOS_TEST_NO_PMAP"):
    import equinox  # noqa: F401 — it asks for pmap when it is imported

    del jax.pmap

if "PYTEST_XDIST_WORKER" not in os.environ:  # before there are others that read
    PROGRAMS.mkdir(parents=True, exist_ok=True)
    if sum(x.stat().st_size for x in PROGRAMS.iterdir()) > 2**30:
        shutil.rmtree(PROGRAMS)

# A first call compiles, and other tests run beside it.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

# Its assertions tell their values.
pytest.register_assert_rewrite("support.problems.quadratics")
TESTS = itertools.count(1)


@pytest.fixture(autouse=True)
def few_programs_are_kept():
    """Linux maps 65,530 areas into a process, and every program takes some hundred."""
    yield
    if next(TESTS) % 50 == 0:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def float64():
    """Numbers that a float64 recurrence can be held against."""
    with jax.enable_x64(True):
        yield


def pytest_collection_finish():
    """Tracing makes many short-lived objects: fewer collections save a tenth."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
