"""Long short-term memory: layers of it over frames, with a linear output per frame."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from models.draws import normal
from models.sharding import gathered, shares

Params = dict[str, Any]
State = tuple[jax.Array, jax.Array]  # (h, c) of one layer
Carry = tuple[State, ...]


class Slopes(NamedTuple):
    """The derivatives of one cell at one frame.

    Attributes:
        by_gates: of c and (the last quarter) of h by what enters the gates,
            (batch, 4 hidden).
        c_by_c: of c by the last c.
        h_by_c: of h by c.
    """

    by_gates: jax.Array
    c_by_c: jax.Array
    h_by_c: jax.Array


def init(key: Any, inputs: int, hidden: int, outputs: int, layers: int = 1) -> Params:
    """Draws weights for frames of `inputs` numbers.

    Returns:
        {"layers": one {"w": (inputs or hidden, 4 hidden), "recurrent":
        (hidden, 4 hidden), "b": (4 hidden,)} a layer, its gates in the order input,
        forget, cell, output; "output": {"w": (hidden, outputs), "b": (outputs,)}}.
        Matrices are normal with variance 1 / rows. Biases are zero, and 1 at forget
        gates (Jozefowicz et al., "An empirical exploration of recurrent network
        architectures", 2015).
    """
    shapes = []
    for layer in range(layers):
        layer_inputs = inputs if layer == 0 else hidden
        shapes += [(layer_inputs, 4 * hidden), (hidden, 4 * hidden)]  # w, recurrent
    shapes.append((hidden, outputs))
    matrices = [w / len(w) ** 0.5 for w in normal(key, shapes)]
    # At 1 a forget gate keeps most of its cell, so that gradients reach early frames.
    b = jnp.repeat(jnp.array([0.0, 1.0, 0.0, 0.0]), hidden)
    return {
        "layers": [
            {"w": w, "recurrent": recurrent, "b": b}
            for w, recurrent in zip(matrices[:-1:2], matrices[1:-1:2], strict=True)
        ],
        "output": {"w": matrices[-1], "b": jnp.zeros(outputs)},
    }


def start(params: Params, batch: int) -> Carry:
    """Makes the first carry: for each layer zeros (h, c), (batch, hidden) each."""
    matrices = [layer["recurrent"] for layer in params["layers"]]
    zeros = [jnp.zeros((batch, w.shape[0]), w.dtype) for w in matrices]
    return tuple((zero, zero) for zero in zeros)


def step(params: Params, carry: Carry, frame: jax.Array) -> tuple[Carry, jax.Array]:
    """Maps one frame, (batch, inputs), to the next carry and (batch, outputs)."""
    carry, outputs = _apply_layers(params, carry, frame[None])
    return carry, outputs[0]


def apply(params: Params, x: jax.Array, remat_chunk: int | None = None) -> jax.Array:
    """Maps whole sequences, as `step` does frame by frame from `start`.

    Args:
        params: weights of `init`.
        x: (batch, frames, inputs).
        remat_chunk: frames of a chunk. A gradient keeps its first carry alone, and
            computes the rest again; None keeps all. The square root of the number of
            frames is a good start.

    Returns:
        (batch, frames, outputs); no output depends on later frames.

    Raises:
        ValueError: a chunk without frames.

    Source: Hochreiter and Schmidhuber, "Long short-term memory", 1997; Gers et al.,
    "Learning to forget", 2000.
    """
    batch, frames, inputs = x.shape
    carry = start(params, batch)
    x = jnp.swapaxes(x, 0, 1)  # (frames, batch, inputs)
    if remat_chunk is None:
        _, y = _apply_layers(params, carry, x)
        return jnp.swapaxes(y, 0, 1)
    if remat_chunk < 1:
        raise ValueError(f"lstm: remat_chunk must be at least 1, got {remat_chunk}")
    x = jnp.pad(x, ((0, -frames % remat_chunk), (0, 0), (0, 0)))
    chunks = x.reshape(-1, remat_chunk, batch, inputs)
    # Inside a scan XLA cannot merge the two computations: no barrier is needed.
    apply_chunk = jax.checkpoint(partial(_apply_layers, params), prevent_cse=False)
    _, y = lax.scan(apply_chunk, carry, chunks)  # (chunks, remat_chunk, batch, outputs)
    y = y.reshape(len(x), batch, y.shape[-1])[:frames]
    return jnp.swapaxes(y, 0, 1)


def _apply_layers(
    params: Params, carry: Carry, x: jax.Array
) -> tuple[Carry, jax.Array]:
    """Takes frames, (frames, batch, inputs), through one layer after the other."""
    new_carry = []
    for layer, state in zip(params["layers"], carry, strict=True):
        # One matmul for all frames: only the recurrent one must wait its turn.
        projected = _product(x, layer["w"]) + layer["b"]  # (frames, batch, 4 hidden)
        recurrent = gathered(layer["recurrent"])  # once, not for each frame
        state, x = _recurrence(recurrent, state, projected)
        new_carry.append(state)
    output = params["output"]
    return tuple(new_carry), _product(x, output["w"]) + output["b"]


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns x @ w, for x of (frames, batch, ...)."""
    # A batch cannot stay cut where it is one axis with the frames: steps of a worker of
    # two devices took 3.4 times as long.
    if shares():
        return x @ w
    # Of one matrix XLA computes the gradient without transposed copies: with all three
    # products it took 2.2 ms instead of 2.7, 64 frames of 8.
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[-1])


@jax.custom_jvp
def _recurrence(recurrent: jax.Array, state: State, projected: jax.Array) -> Any:
    """Takes all frames' projections, (frames, batch, 4 hidden), through one layer."""

    def step_cell(state: State, projected: jax.Array) -> tuple[State, jax.Array]:
        new_state, _ = _cell(recurrent, state, projected)
        return new_state, new_state[0]

    return lax.scan(step_cell, state, projected)


@_recurrence.defjvp
def _recurrence_jvp(primals: Any, tangents: Any) -> Any:
    """The recurrence and its derivative, which jax transposes for a gradient.

    The recurrent weights enter by one matmul over all frames. By jax's own rule it is
    one a frame: a gradient of 64 frames of 8 took 4.8 ms, now 2.2.
    """
    recurrent, state, projected = primals
    d_recurrent, d_state, d_projected = tangents

    def step_cell(
        state: State, projected: jax.Array
    ) -> tuple[State, tuple[jax.Array, Slopes]]:
        new_state, slopes = _cell(recurrent, state, projected)
        return new_state, (new_state[0], slopes)

    def step_derivative(
        d_state: State, frame: tuple[jax.Array, Slopes]
    ) -> tuple[State, jax.Array]:
        d_h, d_c = d_state
        d_gates, slopes = frame
        d_entering = d_gates + d_h @ recurrent
        i, f, g, o = jnp.split(slopes.by_gates * d_entering, 4, axis=-1)
        d_c = slopes.c_by_c * d_c + i + f + g
        d_h = slopes.h_by_c * d_c + o
        return (d_h, d_c), d_h

    new_state, (h, slopes) = lax.scan(step_cell, state, projected)
    earlier_h = jnp.concatenate([state[0][None], h[:-1]])
    d_gates = d_projected + _product(earlier_h, d_recurrent)
    return (new_state, h), lax.scan(step_derivative, d_state, (d_gates, slopes))


def _cell(
    recurrent: jax.Array, state: State, projected: jax.Array
) -> tuple[State, Slopes]:
    """Takes one frame's projection, (batch, 4 hidden), through one layer.

    Returns:
        The next (h, c), and the slopes at this frame.
    """
    h, c = state
    i, f, g, o = jnp.split(projected + h @ recurrent, 4, axis=-1)
    i = jax.nn.sigmoid(i)
    f = jax.nn.sigmoid(f)
    g = jnp.tanh(g)
    o = jax.nn.sigmoid(o)
    c_by_gates = [g * i * (1 - i), c * f * (1 - f), i * (1 - g * g)]
    c = f * c + i * g
    tanh_c = jnp.tanh(c)
    by_gates = jnp.concatenate([*c_by_gates, tanh_c * o * (1 - o)], axis=-1)
    return (o * tanh_c, c), Slopes(by_gates, f, o * (1 - tanh_c * tanh_c))
