"""The CPU devices of this process, and their threads."""

import os

import jax


def use_cpu_devices(count: int) -> None:
    """Sets the number of virtual CPU devices, unless the environment sets it."""
    # The setting would silently override the device count in XLA_FLAGS.
    in_flags = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if in_flags or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return  # the backend already runs, and keeps its devices


def use_devices(count: int) -> None:
    """Sets the number of virtual CPU devices, and of threads.

    Raises:
        ValueError: the backend already runs with another number.
    """
    # Threads, too: XLA splits sums over threads, so their number changes results.
    os.environ |= environment(count, count)
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if jax.device_count() != count:
            raise ValueError(
                f"jax already runs with {jax.device_count()} devices, not {count}"
            ) from None


def environment(devices: int, threads: int) -> dict[str, str]:
    """Returns environment variables that set the CPU devices and threads."""
    return {"JAX_NUM_CPU_DEVICES": str(devices), "NPROC": str(threads)}


def cores() -> int:
    """Returns the number of cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
