"""The LSTM against its equations in NumPy, and what streaming and memory rely on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend import core
from placed import placed

import syncalgos
from models import lstm, sharding

pytestmark = pytest.mark.usefixtures("float64")

INPUTS, HIDDEN, OUTPUTS, BATCH, FRAMES = 3, 4, 2, 2, 11
RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH, FRAMES, INPUTS))
WEIGHTS = RNG.normal(size=(BATCH, FRAMES, OUTPUTS))


def make_params(layers=2):
    """Weights of `init`, and noise on the biases, so that no entry goes unseen."""
    params = lstm.init(jax.random.key(1), INPUTS, HIDDEN, OUTPUTS, layers)
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape), params)


def loss(params, x=X, remat_chunk=None):
    return (WEIGHTS * jnp.sin(lstm.apply(params, x, remat_chunk))).sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm_in_numpy(params, x):
    """One sequence, one frame and one gate at a time (Gers et al. 2000)."""
    params = jax.tree.map(np.asarray, params)
    outputs = np.zeros((len(x), x.shape[1], OUTPUTS))
    for sequence in range(len(x)):
        h = [np.zeros(HIDDEN) for _ in params["layers"]]
        c = [np.zeros(HIDDEN) for _ in params["layers"]]
        for frame in range(x.shape[1]):
            below = x[sequence, frame]
            for n, layer in enumerate(params["layers"]):
                net = {}
                for gate, name in enumerate(["input", "forget", "cell", "output"]):
                    units = slice(gate * HIDDEN, (gate + 1) * HIDDEN)
                    net[name] = layer["b"][units].copy()
                    net[name] += layer["w"][:, units].T @ below
                    net[name] += layer["recurrent"][:, units].T @ h[n]
                c[n] = sigmoid(net["forget"]) * c[n]
                c[n] += sigmoid(net["input"]) * np.tanh(net["cell"])
                h[n] = sigmoid(net["output"]) * np.tanh(c[n])
                below = h[n]
            output = params["output"]
            outputs[sequence, frame] = output["w"].T @ below + output["b"]
    return outputs


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("remat_chunk", [None, 4])
def test_lstm_matches_its_equations(layers, remat_chunk):
    params = make_params(layers)
    actual = lstm.apply(params, X, remat_chunk)
    np.testing.assert_allclose(actual, lstm_in_numpy(params, X), atol=1e-12)


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


def plain(params, x, carry):
    """The model frame by frame, differentiated by jax's own rules."""

    def frame(carry, x):
        after = []
        for layer, (h, c) in zip(params["layers"], carry, strict=True):
            net = x @ layer["w"] + h @ layer["recurrent"] + layer["b"]
            i, f, g, o = jnp.split(net, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            x = jax.nn.sigmoid(o) * jnp.tanh(c)
            after.append((x, c))
        return tuple(after), x @ params["output"]["w"] + params["output"]["b"]

    return jnp.swapaxes(lax.scan(frame, carry, jnp.swapaxes(x, 0, 1))[1], 0, 1)


def plain_loss(params, x=X):
    y = plain(params, x, lstm.start(params, len(x)))
    return (WEIGHTS * jnp.sin(y)).sum()


def assert_near(actual, expected, atol):
    def leaf(a, e):
        a, e = (np.asarray(x, "float64") for x in (a, e))
        np.testing.assert_allclose(a, e, rtol=0, atol=atol)

    jax.tree.map(leaf, actual, expected)


def of(dtype, layers=2):
    """Params and sequences of a dtype."""
    given = make_params(layers), jnp.asarray(X)
    return jax.tree.map(lambda x: x.astype(dtype), given)


# bfloat16 has 8 bits, and entries are up to 2.2: either form errs by 0.03 at most.
@pytest.mark.parametrize(
    ("layers", "dtype", "chunk", "atol"),
    [
        (1, "float64", None, 1e-12),
        (2, "float64", None, 1e-12),
        (2, "float64", 1, 1e-12),
        (2, "float64", 4, 1e-12),
        (2, "float64", 20, 1e-12),
        (2, "float32", None, 1e-5),
        (2, "bfloat16", None, 0.06),
    ],
)
def test_gradients_are_those_of_the_plain_formulation(layers, dtype, chunk, atol):
    given = of(dtype, layers)
    actual = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)(*given, chunk)
    assert {x.dtype.name for x in jax.tree.leaves(actual)} == {dtype}
    assert_near(actual, jax.jit(jax.grad(plain_loss, (0, 1)))(*given), atol)


def test_derivatives_of_lanes_forwards_and_twice_are_those_of_the_plain_formulation():
    given = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), of("float64"))
    towards = jax.tree.map(
        lambda x: jnp.cos(jnp.arange(x.size).reshape(x.shape)), given
    )

    def found(loss):
        def lane(given, towards):
            once = jax.jvp(loss, given, towards)
            return once, jax.jvp(jax.grad(loss, (0, 1)), given, towards)

        return jax.jit(jax.vmap(lane))(given, towards)

    assert_near(found(loss), found(plain_loss), 1e-10)


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-5), ("float64", 1e-12)])
def test_streaming_gives_the_outputs_of_training(dtype, atol):
    """So no output depends on a later frame; a carry may be stored between two."""
    params, x = of(dtype)
    carry, streamed, step = lstm.start(params, BATCH), [], jax.jit(lstm.step)
    for frame in range(FRAMES):
        stored = jax.tree.map(np.asarray, carry)
        carry, output = step(params, stored, x[:, frame])
        streamed.append(output)
    whole = lstm.apply(params, x)
    assert whole.dtype == streamed[0].dtype == dtype
    np.testing.assert_allclose(np.stack(streamed, 1), whole, atol=atol)


def test_gradients_of_a_stream_by_its_first_carry_are_those_of_the_plain_formulation():
    params, x = of("float64")
    first = jax.tree.map(lambda x: x + 0.3, lstm.start(params, BATCH))

    def streamed(carry):
        outputs = []
        for frame in range(3):
            carry, y = lstm.step(params, carry, x[:, frame])
            outputs.append(y)
        return (jnp.stack(outputs, 1) ** 2).sum()

    def at_once(carry):
        return (plain(params, x[:, :3], carry) ** 2).sum()

    assert_near(jax.grad(streamed)(first), jax.grad(at_once)(first), 1e-12)


def loops(jaxpr):
    """All scans of a jaxpr."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from loops(inner)


def test_no_frame_adds_to_the_recurrent_weights_gradient():
    """Frame by frame the sum was a carry of the loop: 64 small matmuls, not one."""
    shape = HIDDEN, 4 * HIDDEN

    def adds(loss):
        jaxpr = jax.make_jaxpr(jax.grad(loss))(make_params(), X).jaxpr
        found = [v.aval.shape for loop in loops(jaxpr) for v in loop.outvars]
        return shape in found

    assert adds(plain_loss)
    assert not adds(loss)


def mean_loss(params, batch):
    return jnp.mean((lstm.apply(params, batch["x"]) - batch["y"]) ** 2)


def trained(strategy, loss=mean_loss, **options):
    """The trainer and its center after four steps."""
    with jax.enable_x64(False):
        rng = np.random.default_rng(3)
        shapes = {"x": (4, 8, FRAMES, INPUTS), "y": (4, 8, FRAMES, OUTPUTS)}
        batches = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        trainer = syncalgos.DataParallel(
            syncalgos.stateless(loss), optax.sgd(0.1), strategy, **placed(options)
        )
        params = lstm.init(jax.random.key(1), INPUTS, HIDDEN, OUTPUTS, layers=2)
        state, _ = trainer.run(trainer.init(params), jax.tree.map(np.float32, batches))
        return trainer, jax.tree.map(np.asarray, trainer.center(state))


def test_lanes_are_merged_under_sync_sgd():
    options = {"workers": 4, "devices": [0], "lane_form": "merged"}
    trainer, center = trained(syncalgos.sync_sgd(), **options)
    assert trainer.lane_form == "merged"
    options = {"workers": 4, "devices": [0], "lane_form": "vectorized"}
    assert_near(center, trained(syncalgos.sync_sgd(), **options)[1], 1e-6)


@pytest.mark.parametrize("backend", ["shard_map", "pmap"])
def test_devices_train_as_lanes(backend):
    strategy = syncalgos.model_averaging(2)
    lanes = trained(strategy, workers=2, backend="vmap", lane_form="vectorized")[1]
    actual = trained(strategy, workers=2, backend=backend, devices=[0, 1])[1]
    assert_near(actual, lanes, 1e-6)


@pytest.mark.parametrize("chunk", [None, 4])
def test_a_worker_of_two_devices_trains_as_one(chunk):
    def loss(params, batch):
        return jnp.mean((lstm.apply(params, batch["x"], chunk) - batch["y"]) ** 2)

    mesh, one = {"fsdp": 2}, trained(syncalgos.sync_sgd(), workers=1, devices=[0])[1]
    params = lstm.init(jax.random.key(1), INPUTS, HIDDEN, OUTPUTS, layers=2)
    cut = jax.tree.map(lambda x: sharding.MATRICES("", x.shape, mesh), params)
    options = {"workers": 1, "devices": [0, 1], "mesh": mesh, "shardings": cut}
    actual = trained(syncalgos.sync_sgd(), loss, backend="shard_map", **options)[1]
    assert_near(actual, one, 1e-6)


def test_forget_gates_alone_start_with_a_bias():
    params = lstm.init(jax.random.key(0), INPUTS, HIDDEN, OUTPUTS, layers=2)
    for layer in params["layers"]:
        expected = np.repeat([0, 1, 0, 0], HIDDEN)
        np.testing.assert_array_equal(layer["b"], expected)
    assert not params["output"]["b"].any()


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
