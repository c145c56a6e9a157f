"""The LSTM against its equations, and what streaming and memory rely on."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend import core
from support.placements import placed
from support.trees import assert_close

import syncalgos
from models import lstm, sharding

pytestmark = pytest.mark.usefixtures("float64")

INPUTS = 3
HIDDEN = 4
OUTPUTS = 2
BATCH = 2
FRAMES = 11
RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH, FRAMES, INPUTS))
WEIGHTS = RNG.normal(size=(BATCH, FRAMES, OUTPUTS))


def make_params(layers=2):
    """Weights of `init`, and noise on the biases, so that no entry goes unseen."""
    params = lstm.init(jax.random.key(1), INPUTS, HIDDEN, OUTPUTS, layers)
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape), params)


@pytest.mark.slow
def test_remat_chunks_take_less_memory():
    """256 frames in chunks of 16: 16 carries and the values of 16 frames, not 256."""

    def memory(remat_chunk):
        def loss(params, x):
            return (lstm.apply(params, x, remat_chunk) ** 2).sum()

        params = lstm.init(jax.random.key(0), 8, 16, 4, layers=2)
        compiled = (
            jax.jit(jax.grad(loss)).lower(params, jnp.ones((4, 256, 8))).compile()
        )
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert memory(16) < memory(None) / 4


def plain_apply(params, x):
    """Gers et al. 2000, frame by frame, differentiated by jax's own rules."""

    def frame(carry, x):
        new_carry = []
        for layer, (h, c) in zip(params["layers"], carry, strict=True):
            net = x @ layer["w"] + h @ layer["recurrent"] + layer["b"]
            i, f, g, o = jnp.split(net, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            x = jax.nn.sigmoid(o) * jnp.tanh(c)
            new_carry.append((x, c))
        return tuple(new_carry), x @ params["output"]["w"] + params["output"]["b"]

    zeros = jnp.zeros((len(x), HIDDEN), x.dtype)
    carry = tuple((zeros, zeros) for _ in params["layers"])
    return jnp.swapaxes(lax.scan(frame, carry, jnp.swapaxes(x, 0, 1))[1], 0, 1)


def loss(params, x, apply=lstm.apply):
    """A loss in which each output counts otherwise."""
    y = apply(params, x)
    return (WEIGHTS * jnp.sin(y)).sum(), y


def gradients(*arguments, apply):
    return jax.jit(jax.grad(partial(loss, apply=apply), (0, 1), has_aux=True))(
        *arguments
    )


def assert_near(actual, expected, atol):
    float_trees = [
        jax.tree.map(lambda x: np.asarray(x, float), x) for x in (actual, expected)
    ]
    assert_close(*float_trees, rtol=0, atol=atol)


# bfloat16 has 8 bits, and entries are up to 2.2: either form errs by 0.03 at most.
@pytest.mark.parametrize(
    ("layers", "dtype", "remat_chunk", "atol"),
    [
        (2, "float64", 4, 1e-12),  # the last chunk is not full
        pytest.param(2, "bfloat16", None, 0.06, marks=pytest.mark.slow),
        pytest.param(3, "float64", None, 1e-12, marks=pytest.mark.slow),
        pytest.param(1, "float64", 20, 1e-12, marks=pytest.mark.long),
        pytest.param(2, "float64", 1, 1e-12, marks=pytest.mark.long),
    ],
)
def test_lstm_and_its_gradients_match_the_equations(layers, dtype, remat_chunk, atol):
    arguments = jax.tree.map(lambda x: x.astype(dtype), (make_params(layers), X))
    chunked_gradients = gradients(
        *arguments, apply=partial(lstm.apply, remat_chunk=remat_chunk)
    )
    assert {x.dtype.name for x in jax.tree.leaves(chunked_gradients)} == {dtype}
    assert_near(chunked_gradients, gradients(*arguments, apply=plain_apply), atol)


@pytest.mark.slow
def test_derivatives_of_lanes_forwards_and_twice_are_those_of_the_plain_formulation():
    arguments = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), (make_params(), X))
    towards = jax.tree.map(
        lambda x: jnp.cos(jnp.arange(x.size).reshape(x.shape)), arguments
    )

    def differentiate(apply):
        def value(*arguments):
            return loss(*arguments, apply)[0]

        def lane(arguments, tangents):
            once = jax.jvp(value, arguments, tangents)
            return once, jax.jvp(jax.grad(value, (0, 1)), arguments, tangents)

        return jax.jit(jax.vmap(lane))(arguments, towards)

    assert_near(differentiate(lstm.apply), differentiate(plain_apply), 1e-10)


@pytest.mark.slow
def test_streaming_gives_the_outputs_of_training():
    """So no output depends on a later frame; a carry may be stored between two."""
    params = make_params()
    carry = lstm.start(params, BATCH)
    streamed = []
    step = jax.jit(lstm.step)
    for frame in range(FRAMES):
        carry, output = step(params, jax.tree.map(np.asarray, carry), X[:, frame])
        streamed.append(output)
    np.testing.assert_allclose(np.stack(streamed, 1), lstm.apply(params, X), atol=1e-12)


def loops(jaxpr):
    """All scans of a jaxpr."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner_jaxpr in core.jaxprs_in_params(equation.params):
            yield from loops(inner_jaxpr)


@pytest.mark.slow
def test_no_frame_adds_to_the_recurrent_weights_gradient():
    """Frame by frame the sum was a carry of the loop: 64 small matmuls, not one."""
    shape = HIDDEN, 4 * HIDDEN

    def adds(apply):
        gradient = jax.grad(partial(loss, apply=apply), has_aux=True)
        jaxpr = jax.make_jaxpr(gradient)(make_params(), X).jaxpr
        loop_shapes = []
        for loop in loops(jaxpr):
            loop_shapes += [variable.aval.shape for variable in loop.outvars]
        return shape in loop_shapes

    assert adds(plain_apply)
    assert not adds(lstm.apply)


@pytest.mark.slow
@pytest.mark.parametrize("remat_chunk", [None, 4])
def test_a_worker_of_two_devices_trains_as_one(remat_chunk):
    rng = np.random.default_rng(3)
    mesh = {"fsdp": 2}
    shapes = {"x": (4, 8, FRAMES, INPUTS), "y": (4, 8, FRAMES, OUTPUTS)}
    batches = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    params = make_params()

    def mean_loss(params, batch):
        return jnp.mean((lstm.apply(params, batch["x"], remat_chunk) - batch["y"]) ** 2)

    def trained(**options):
        parts = syncalgos.stateless(mean_loss), optax.sgd(0.1), syncalgos.sync_sgd()
        trainer = syncalgos.DataParallel(*parts, workers=1, **placed(options))
        state, _ = trainer.run(trainer.init(params), batches)
        return trainer.center(state)

    cut = jax.tree.map(lambda x: sharding.MATRICES("", x.shape, mesh), params)
    options = {"devices": [0, 1], "mesh": mesh, "shardings": cut}
    assert_near(trained(backend="shard_map", **options), trained(devices=[0]), 1e-12)


def test_forget_gates_alone_start_with_a_bias():
    params = lstm.init(jax.random.key(0), INPUTS, HIDDEN, OUTPUTS, layers=2)
    for layer in params["layers"]:
        np.testing.assert_array_equal(layer["b"], np.repeat([0, 1, 0, 0], HIDDEN))
    assert not params["output"]["b"].any()


@pytest.mark.slow
def test_matrices_start_with_variance_one_over_rows():
    params = lstm.init(jax.random.key(0), 50, 64, 100, layers=2)
    lower_layer, upper_layer = params["layers"]
    matrices = {
        (50, 256): [lower_layer["w"]],
        (64, 256): [
            lower_layer["recurrent"],
            upper_layer["w"],
            upper_layer["recurrent"],
        ],
        (64, 100): [params["output"]["w"]],
    }
    for shape, matrices_of_shape in matrices.items():
        for matrix in matrices_of_shape:
            assert matrix.shape == shape
            # The mean square of n normals errs by sqrt(2 / n), 2 % at most: 5 of those.
            assert abs((matrix**2).mean() * shape[0] - 1) < 0.1
    assert (
        abs(
            np.corrcoef(lower_layer["recurrent"].ravel(), upper_layer["w"].ravel())[
                0, 1
            ]
        )
        < 0.1
    )
