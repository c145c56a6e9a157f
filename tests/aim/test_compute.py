"""Operations counted from a jaxpr, against counts by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from experiments.aim.compile import Flops, count_flops

A = 3
B = 5
C = 7
D = 4


def counted(function, *shapes):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return count_flops(jax.make_jaxpr(function)(*arrays))


def exactly(count):
    return Flops(count, count)


def test_a_product_takes_two_for_each_entry_and_contracted_one():
    assert counted(jnp.matmul, (A, B), (B, C)) == exactly(2 * A * B * C)
    assert counted(jnp.matmul, (D, A, B), (D, B, C)) == exactly(2 * D * A * B * C)
    assert counted(jnp.add, (A, B), (A, B)) == Flops()


def test_a_loop_counts_as_often_as_it_runs():
    def loop(x, w):
        return lax.scan(lambda x, _: (x @ w, None), x, None, length=6)[0]

    assert counted(loop, (A, B), (B, B)) == exactly(6 * 2 * A * B * B)


def test_a_condition_has_a_least_and_a_most():
    def either(x, w):
        return lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w)

    product_flops = 2 * A * B * B
    assert counted(either, (A, B), (B, B)) == Flops(product_flops, 2 * product_flops)


def test_a_loop_of_unknown_length_counts_once():
    def loop(x, w):
        return lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ w, x)

    assert counted(loop, (A, B), (B, B)) == exactly(2 * A * B * B)


@pytest.mark.parametrize(("remat", "forwards"), [(False, 1), (True, 2)])
def test_what_a_gradient_computes_again_counts_again(remat, forwards):
    """Two layers: forward, then backward for both weights and for one input."""

    def loss(w, v, x):
        def apply(x):
            return jnp.tanh(jnp.tanh(x @ w) @ v)

        hidden = jax.checkpoint(apply)(x) if remat else apply(x)
        return (hidden**2).sum()

    product_flops = 2 * A * B * B
    flops = counted(jax.grad(loss, (0, 1)), (B, B), (B, B), (A, B))
    # XLA leaves out what nobody reads of a second forward pass; so does jax.
    assert flops == exactly(forwards * 2 * product_flops + 3 * product_flops)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_takes_its_kernel_for_each_entry(groups):
    def apply(x, w):
        return lax.conv_general_dilated(
            x,
            w,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    inputs = 6
    outputs = 4
    flops = counted(apply, (2, 8, 8, inputs), (3, 3, inputs // groups, outputs))
    assert flops == exactly(2 * (2 * 8 * 8 * outputs) * 3 * 3 * inputs // groups)


def test_gradients_of_a_convolution_take_as_much_as_it_each():
    """A VALID one: a border of zeros would count too."""

    def loss(x, w):
        convolved = lax.conv_general_dilated(
            x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (convolved**2).sum()

    shapes = (2, 8, 8, 6), (3, 3, 6, 4)
    forward = 2 * (2 * 6 * 6 * 4) * 3 * 3 * 6
    kernel_flops = counted(jax.grad(loss, 1), *shapes)
    assert kernel_flops == exactly(2 * forward)
