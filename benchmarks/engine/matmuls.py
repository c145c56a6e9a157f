"""Runs only the matmuls and convolutions of a model's gradient, from its trace."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from benchmarks.work import Work

PRODUCTS = ("dot_general", "conv_general_dilated")


class Product(NamedTuple):
    """A matmul or convolution of a worker-step.

    Attributes:
        equation: its equation in the traced gradient.
        times: how often a worker-step runs it.
    """

    equation: Any
    times: int

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Returns the product of other operands."""
        return self.equation.primitive.bind(x, y, **self.equation.params)


def products(work: Work) -> list[Product]:
    """Returns all products of a worker's local step, from its traced gradient."""

    def batch(x):
        return jax.ShapeDtypeStruct((work.batch, *x.shape[1:]), x.dtype)

    grad = jax.make_jaxpr(jax.value_and_grad(work.loss))
    return [*_products(grad(work.params, jax.tree.map(batch, work.data)).jaxpr)]


def flops(found: list[Product]) -> int:
    """Returns the floating-point operations of the matmuls among the products."""
    return sum(map(_flops, found))


def alone(work: Work, worker_steps: int, devices: int) -> Callable[[], None]:
    """Returns a program of only these products, on random operands.

    Args:
        work: the work whose local steps have the products.
        worker_steps: number of worker-steps of all devices.
        devices: number of devices that share them.
    """
    found = products(work)
    rng = np.random.default_rng(0)

    def operand(x):
        values = rng.normal(size=(devices, *x.aval.shape), scale=1e-2)
        return jnp.asarray(values, x.aval.dtype)

    pairs = [tuple(map(operand, one.equation.invars)) for one in found]
    lefts, rights = zip(*pairs, strict=True)

    def device(lefts, rights):
        # One entry of each result goes into the next operand, and all results are
        # carried, so that the compiler removes nothing and moves nothing out of loops.
        def local_step(_, carry):
            lefts, made = map(list, carry)
            last = _first(made[-1])
            for number, product in enumerate(found):

                def again(_, own, number=number, product=product):
                    x, result, last = own
                    x = x.at[(0,) * x.ndim].set(jnp.tanh(last).astype(x.dtype))
                    result = product(x, rights[number])
                    return x, result, _first(result)

                own = lefts[number], made[number], last
                own = lax.fori_loop(0, product.times, again, own)
                lefts[number], made[number], last = own
            return lefts, made

        made = [_zeros(product) for product in found]
        return lax.fori_loop(0, -(-worker_steps // devices), local_step, (lefts, made))

    run = jax.pmap(device, devices=jax.devices()[:devices])
    return lambda: jax.block_until_ready(run([*lefts], [*rights]))


def _zeros(product: Product) -> jax.Array:
    made = product.equation.outvars[0].aval
    return jnp.zeros(made.shape, made.dtype)


def _first(x: jax.Array) -> jax.Array:
    """Returns the first entry."""
    return x[(0,) * x.ndim].astype(jnp.float32)


def _products(jaxpr: Any, times: int = 1) -> Iterator[Product]:
    for equation in jaxpr.eqns:
        if equation.primitive.name in PRODUCTS:
            yield Product(equation, times)
        turns = times * equation.params.get("length", 1)
        for inner in core.jaxprs_in_params(equation.params):
            yield from _products(inner, turns)


def _flops(product: Product) -> int:
    equation = product.equation
    if equation.primitive.name != "dot_general":
        return 0
    (over, _), _ = equation.params["dimension_numbers"]
    left, made = equation.invars[0].aval.shape, equation.outvars[0].aval.size
    return 2 * product.times * made * int(np.prod([left[i] for i in over]))
