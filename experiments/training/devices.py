"""The CPU devices of this process: how many jax makes, and their threads."""

import os

import jax


def use_cpu_devices(count: int) -> None:
    """Has so many virtual CPU devices, unless the environment says otherwise."""
    # The setting overrides XLA_FLAGS' device count without a word.
    in_flags = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if in_flags or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return  # the backend runs already, with the devices it was started with


def use_devices(count: int) -> None:
    """Has so many virtual CPU devices, and as many threads.

    Raises:
        ValueError: the backend runs already, with another number.
    """
    # Threads, too: XLA splits sums over them, so their number changes the bits.
    os.environ |= environment(count, count)
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if jax.device_count() != count:
            raise ValueError(
                f"jax runs already, with {jax.device_count()} devices, not {count}"
            ) from None


def environment(devices: int, threads: int) -> dict[str, str]:
    """Returns the variables by which a process has so many CPU devices and threads."""
    return {"JAX_NUM_CPU_DEVICES": str(devices), "NPROC": str(threads)}


def cores() -> int:
    """Returns the number of cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
