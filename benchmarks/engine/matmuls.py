"""Runs only the matmuls and convolutions of a model's gradient, from its trace."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from benchmarks.work import Work

PRODUCTS = ("dot_general", "conv_general_dilated")

Carry = tuple[list[jax.Array], list[jax.Array]]  # left operands, results


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

    def batch_shape(x: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((work.batch, *x.shape[1:]), x.dtype)

    trace = jax.make_jaxpr(jax.value_and_grad(work.loss))
    batch = jax.tree.map(batch_shape, work.data)
    return [*_find_products(trace(work.params, batch).jaxpr)]


def flops(products: list[Product]) -> int:
    """Returns the floating-point operations of the matmuls among the products."""
    return sum(map(_count_flops, products))


def alone(work: Work, worker_steps: int, devices: int) -> Callable[[], None]:
    """Returns a program of only these products, on random operands.

    Args:
        work: the work whose local steps have the products.
        worker_steps: number of worker-steps of all devices.
        devices: number of devices that share them.
    """
    work_products = products(work)
    rng = np.random.default_rng(0)

    def draw_operand(variable: Any) -> jax.Array:
        values = rng.normal(size=(devices, *variable.aval.shape), scale=1e-2)
        return jnp.asarray(values, variable.aval.dtype)

    left_operands = []
    right_operands = []
    for product in work_products:
        left, right = product.equation.invars
        left_operands.append(draw_operand(left))
        right_operands.append(draw_operand(right))
    run = jax.pmap(
        partial(_run_products, work_products, -(-worker_steps // devices)),
        devices=jax.devices()[:devices],
    )
    return lambda: jax.block_until_ready(run(left_operands, right_operands))


def _run_products(
    products: list[Product],
    steps: int,
    left_operands: list[jax.Array],
    right_operands: list[jax.Array],
) -> Carry:
    """Runs the products of as many local steps, each after the one before it."""

    # One entry of each result goes into the next operand, and all results are
    # carried, so that the compiler removes nothing and moves nothing out of loops.
    def local_step(_: jax.Array, carry: Carry) -> Carry:
        left_operands, results = map(list, carry)
        entry = _first_entry(results[-1])
        for number, product in enumerate(products):

            def multiply(
                _: jax.Array,
                carry: tuple[jax.Array, jax.Array, jax.Array],
                product: Product = product,
                right: jax.Array = right_operands[number],
            ) -> tuple[jax.Array, jax.Array, jax.Array]:
                left, _result, entry = carry
                entry = jnp.tanh(entry).astype(left.dtype)
                left = left.at[(0,) * left.ndim].set(entry)
                result = product(left, right)
                return left, result, _first_entry(result)

            left_operands[number], results[number], entry = lax.fori_loop(
                0,
                product.times,
                multiply,
                (left_operands[number], results[number], entry),
            )
        return left_operands, results

    zeros = [_zero_result(product) for product in products]
    return lax.fori_loop(0, steps, local_step, (left_operands, zeros))


def _zero_result(product: Product) -> jax.Array:
    result = product.equation.outvars[0].aval
    return jnp.zeros(result.shape, result.dtype)


def _first_entry(x: jax.Array) -> jax.Array:
    return x[(0,) * x.ndim].astype(jnp.float32)


def _find_products(jaxpr: Any, times: int = 1) -> Iterator[Product]:
    for equation in jaxpr.eqns:
        if equation.primitive.name in PRODUCTS:
            yield Product(equation, times)
        nested_times = times * equation.params.get("length", 1)
        for nested_jaxpr in core.jaxprs_in_params(equation.params):
            yield from _find_products(nested_jaxpr, nested_times)


def _count_flops(product: Product) -> int:
    equation = product.equation
    if equation.primitive.name != "dot_general":
        return 0
    (contracted_axes, _), _ = equation.params["dimension_numbers"]
    left_shape = equation.invars[0].aval.shape
    contracted_size = int(np.prod([left_shape[i] for i in contracted_axes]))
    return 2 * product.times * equation.outvars[0].aval.size * contracted_size
