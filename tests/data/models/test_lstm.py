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
        after = []
        for layer, (h, c) in zip(params["layers"], carry, strict=True):
            net = x @ layer["w"] + h @ layer["recurrent"] + layer["b"]
            i, f, g, o = jnp.split(net, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            x = jax.nn.sigmoid(o) * jnp.tanh(c)
            after.append((x, c))
        return tuple(after), x @ params["output"]["w"] + params["output"]["b"]

    zeros = jnp.zeros((len(x), HIDDEN), x.dtype)
    carry = tuple((zeros, zeros) for _ in params["layers"])
    return jnp.swapaxes(lax.scan(frame, carry, jnp.swapaxes(x, 0, 1))[1], 0, 1)


def loss(params, x, apply=lstm.apply):
    """A loss in which each output counts otherwise."""
    y = apply(params, x)
    return (WEIGHTS * jnp.sin(y)).sum(), y


def gradients(*given, apply):
    return jax.jit(jax.grad(partial(loss, apply=apply), (0, 1), has_aux=True))(*given)


def assert_near(actual, expected, atol):
    wide = [jax.tree.map(lambda x: np.asarray(x, float), x) for x in (actual, expected)]
    assert_close(*wide, rtol=0, atol=atol)


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
    given = jax.tree.map(lambda x: x.astype(dtype), (make_params(layers), X))
    found = gradients(*given, apply=partial(lstm.apply, remat_chunk=remat_chunk))
    assert {x.dtype.name for x in jax.tree.leaves(found)} == {dtype}
    assert_near(found, gradients(*given, apply=plain_apply), atol)


@pytest.mark.slow
def test_derivatives_of_lanes_forwards_and_twice_are_those_of_the_plain_formulation():
    given = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), (make_params(), X))
    towards = jax.tree.map(
        lambda x: jnp.cos(jnp.arange(x.size).reshape(x.shape)), given
    )

    def found(apply):
        def value(*given):
            return loss(*given, apply)[0]

        def lane(given, towards):
            once = jax.jvp(value, given, towards)
            return once, jax.jvp(jax.grad(value, (0, 1)), given, towards)

        return jax.jit(jax.vmap(lane))(given, towards)

    assert_near(found(lstm.apply), found(plain_apply), 1e-10)


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
        for inner in core.jaxprs_in_params(equation.params):
            yield from loops(inner)


@pytest.mark.slow
def test_no_frame_adds_to_the_recurrent_weights_gradient():
    """Frame by frame the sum was a carry of the loop: 64 small matmuls, not one."""
    shape = HIDDEN, 4 * HIDDEN

    def adds(apply):
        gradient = jax.grad(partial(loss, apply=apply), has_aux=True)
        jaxpr = jax.make_jaxpr(gradient)(make_params(), X).jaxpr
        return shape in [v.aval.shape for loop in loops(jaxpr) for v in loop.outvars]

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
        given = syncalgos.stateless(mean_loss), optax.sgd(0.1), syncalgos.sync_sgd()
        trainer = syncalgos.DataParallel(*given, workers=1, **placed(options))
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
    first, second = params["layers"]
    matrices = {
        (50, 256): [first["w"]],
        (64, 256): [first["recurrent"], second["w"], second["recurrent"]],
        (64, 100): [params["output"]["w"]],
    }
    for shape, same in matrices.items():
        for matrix in same:
            assert matrix.shape == shape
            # The mean square of n normals errs by sqrt(2 / n), 2 % at most: 5 of those.
            assert abs((matrix**2).mean() * shape[0] - 1) < 0.1
    assert abs(np.corrcoef(first["recurrent"].ravel(), second["w"].ravel())[0, 1]) < 0.1
