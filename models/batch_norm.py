"""Batch normalisation, by one worker's batch or by the batch of all workers."""

import jax
import jax.numpy as jnp
from jax import lax

Params = dict[str, jax.Array]
Buffers = dict[str, jax.Array]


def init(channels: int) -> tuple[Params, Buffers]:
    """Returns scale 1 and bias 0, and running mean 0 and variance 1, (channels,)."""
    params = {"scale": jnp.ones(channels), "bias": jnp.zeros(channels)}
    return params, {"mean": jnp.zeros(channels), "var": jnp.ones(channels)}


def apply(
    params: Params,
    buffers: Buffers,
    x: jax.Array,
    train: bool,
    axis_name: str | tuple[str, ...] | None = None,
    momentum: float = 0.9,
    epsilon: float = 1e-5,
) -> tuple[jax.Array, Buffers]:
    """Normalises each channel, the last axis of x, then scales and shifts it.

        y = scale (x - mean) / sqrt(var + epsilon) + bias

    Args:
        params: {"scale", "bias"}, (channels,).
        buffers: {"mean", "var"}, (channels,): the running statistics.
        x: (..., channels).
        train: take the batch's statistics, and move the running ones towards them;
            else take the running ones.
        axis_name: the mapped axis or axes over whose workers the batch lies; None takes
            each worker's own batch. Only with `train`.
        momentum: weight of the running statistics against the batch's.
        epsilon: added to the variance.

    Returns:
        y, shaped and typed as x, and the running statistics, which change only with
        `train`.

    The variance divides by the number of entries, in the running statistics too (as in
    flax; PyTorch's divide by one entry less). With `axis_name` workers average two
    vectors of channels in a forward pass. A worker's gradient is then that of the sum
    of all workers' losses by its own copy of the params: the mean over the workers is
    the gradient of the mean loss.

    Source: Ioffe and Szegedy, "Batch normalization: accelerating deep network training
    by reducing internal covariate shift", ICML 2015.
    """
    mean = buffers["mean"]
    var = buffers["var"]
    if train:

        def batch_mean(values: jax.Array) -> jax.Array:
            local_mean = jnp.mean(values, axis=tuple(range(x.ndim - 1)))
            return local_mean if axis_name is None else lax.pmean(local_mean, axis_name)

        float_x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = batch_mean(float_x)
        # A second pass: mean(x²) - mean(x)² would cancel where the mean is far from 0.
        var = batch_mean((float_x - mean) ** 2)
        buffers = {
            "mean": momentum * buffers["mean"] + (1 - momentum) * mean,
            "var": momentum * buffers["var"] + (1 - momentum) * var,
        }
    y = (x - mean) * (params["scale"] * lax.rsqrt(var + epsilon)) + params["bias"]
    return y.astype(x.dtype), buffers
