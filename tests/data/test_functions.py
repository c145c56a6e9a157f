"""Functions with a known minimum: heights, gradients and their noise."""

import jax
import numpy as np
import pytest

from experiments.tasks.functions import quadratic, rosenbrock
from syncalgos.collectives import PyTree

TASKS = {"quadratic": quadratic, "rosenbrock": rosenbrock}


def value_and_gradient(task, params: PyTree, count=1, seed=0, train=True):
    """The mean loss of some examples, and its gradient."""
    batch = {"number": np.zeros(count, np.int32)}

    def loss(params):
        values, _ = task.apply(params, (), batch, jax.random.key(seed), train)
        return values["loss"].mean()

    return jax.value_and_grad(loss)(params)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_the_minimum_is_0_where_the_distance_is(name):
    """Newton's steps arrive there; nothing of it is taken from a task."""
    with jax.enable_x64(True):
        task = TASKS[name](noise=0.0)
        x = np.float64(task.init(jax.random.key(3))[0]["x"])

        def gradient(x):
            return value_and_gradient(task, {"x": x})[1]["x"]

        for _ in range(20):
            x = x - np.linalg.solve(jax.jacobian(gradient)(x), gradient(x))
        batch = {"number": np.zeros(2, np.int32)}
        values, _ = task.apply({"x": x}, (), batch, jax.random.key(0), train=False)
        np.testing.assert_allclose(values["loss"], [0, 0], atol=1e-20)
        np.testing.assert_allclose(values["distance"], [0, 0], atol=1e-10)


@pytest.mark.slow
def test_a_quadratic_has_the_eigenvalues_that_it_was_asked_for():
    with jax.enable_x64(True):
        task = quadratic(dimensions=7, condition=100.0, noise=0.0)
        curved = jax.jit(jax.hessian(lambda x: value_and_gradient(task, {"x": x})[0]))
        hessian = curved(np.zeros(7))
        eigenvalues = np.linalg.eigvalsh(hessian)
        np.testing.assert_allclose(
            eigenvalues, 10.0 ** np.linspace(-2, 0, 7), rtol=1e-9
        )
        assert np.abs(hessian - np.diag(np.diag(hessian))).max() > 0.01  # rotated


def test_rosenbrock_is_rosenbrocks():
    value, gradient = value_and_gradient(
        rosenbrock(noise=0.0), {"x": np.array([-1.2, 1.0])}
    )
    assert value == pytest.approx(24.2)
    np.testing.assert_allclose(gradient["x"], [-215.6, -88.0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("quadratic", 1), ("rosenbrock", 16)])
def test_noise_is_of_the_gradient_alone_and_falls_with_the_batch(name, count):
    task = TASKS[name](noise=2.0)
    plain = TASKS[name](noise=0.0)
    params = task.init(jax.random.key(1))[0]
    height, exact = value_and_gradient(plain, params, count)
    draw_gradients = jax.jit(
        jax.vmap(lambda seed: value_and_gradient(task, params, count, seed))
    )
    heights, gradients = draw_gradients(np.arange(2000))
    np.testing.assert_allclose(heights, height, rtol=1e-5)
    noise = np.asarray(gradients["x"]) - exact["x"]
    deviation = 2 / np.sqrt(count)
    assert np.std(noise) == pytest.approx(deviation, rel=0.05)
    assert np.abs(noise.mean(0)).max() < 4 * deviation / np.sqrt(2000)
    # None in an evaluation.
    assert value_and_gradient(task, params, count, train=False)[0] == pytest.approx(
        height
    )
