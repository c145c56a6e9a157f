"""The mean of those workers' trees whose leaves are of usual size for them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import collectives
from syncalgos.collectives import Axis, PyTree

LEAST_DEVIATION = 1e-3  # of the mean: norms that differ by rounding are alike


class Norms(NamedTuple):
    """The usual norms of each leaf so far: their number, mean and variance, (leaves,).

    Mean and variance weigh a norm by (1 - rate) to the power of how many came after it.
    """

    number: jax.Array
    mean: jax.Array
    variance: jax.Array


class Screen(NamedTuple):
    """What is usual.

    Attributes:
        threshold: standard deviations above its mean up to which a norm is usual.
        rate: the weight of the newest norm in mean and deviation.
        trusted: how many finite norms of a leaf are taken as usual at first.
        clip: the largest norm of a leaf of the mean.
    """

    threshold: float
    rate: float
    trusted: int
    clip: float


def none_seen(params: PyTree) -> Norms:
    """No norms yet, of params that are at least float32."""
    leaves = jax.tree.leaves(params)
    zeros = jnp.zeros(len(leaves), jnp.result_type(jnp.float32, *leaves))
    return Norms(zeros, zeros, zeros)


def screened_mean(
    tree: PyTree, seen: Norms, screen: Screen, axis: Axis
) -> tuple[PyTree, PyTree, Norms]:
    """Weighs the workers' leaves by exp(-norm), those of unusual norm by 0.

    Args:
        tree: this worker's, at least float32.
        seen: its norms so far.
        screen: what is usual.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        The weighted mean, clipped; whether a leaf is usual on any worker, a tree of
        booleans; and the norms seen. All send the tree once, and gather the norms.
    """
    leaves, form = jax.tree.flatten(tree)
    norms = jnp.array([_norm(x) for x in leaves], seen.mean.dtype)
    usual = _are_usual(norms, seen, screen)
    of_all = collectives.gather(jnp.where(usual, norms, jnp.inf), axis)
    weights = jax.nn.softmax(-of_all, axis=0)[collectives.index(axis)]
    shares = weights * collectives.size(axis)
    sent = [
        jnp.where(ok, share.astype(x.dtype) * x, 0)  # 0 times NaN would be NaN
        for x, share, ok in zip(leaves, shares, usual, strict=True)
    ]
    mean = jax.tree.map(
        lambda g: g * jnp.minimum(1, screen.clip / (_norm(g) + 1e-6)),
        collectives.mean(form.unflatten(sent), axis),
    )
    on_any = form.unflatten([*jnp.isfinite(of_all).any(0)])
    return mean, on_any, _with_usual(norms, usual, seen, screen.rate)


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(x * x))


def _are_usual(norms: jax.Array, seen: Norms, screen: Screen) -> jax.Array:
    least = LEAST_DEVIATION * seen.mean
    deviation = jnp.maximum(jnp.sqrt(seen.variance), least)
    is_near = norms <= seen.mean + screen.threshold * deviation
    return jnp.isfinite(norms) & ((seen.number < screen.trusted) | is_near)


def _with_usual(norms: jax.Array, usual: jax.Array, seen: Norms, rate: float) -> Norms:
    """Notes the norms that are usual."""
    number = seen.number + 1
    share = rate / (1 - (1 - rate) ** number)  # 1 for the first: no zeros weigh in
    apart = norms - seen.mean
    mean = seen.mean + share * apart
    variance = (1 - share) * (seen.variance + share * apart**2)
    noted = Norms(number, mean, variance)
    return jax.tree.map(lambda new, old: jnp.where(usual, new, old), noted, seen)
