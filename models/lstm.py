"""Long short-term memory: layers of it over frames, with a linear output per frame."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from models.draws import normal
from models.sharding import gathered

Params = dict[str, Any]
Carry = tuple[tuple[jax.Array, jax.Array], ...]


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
    rows = [inputs] + [hidden] * (2 * layers - 1)  # w and recurrent of each layer
    shapes = [*((n, 4 * hidden) for n in rows), (hidden, outputs)]
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
    zeros = [jnp.zeros((batch, x.shape[0]), x.dtype) for x in matrices]
    return tuple((x, x) for x in zeros)


def step(params: Params, carry: Carry, frame: jax.Array) -> tuple[Carry, jax.Array]:
    """Maps one frame, (batch, inputs), to the next carry and (batch, outputs)."""
    carry, outputs = _frames(params, carry, frame[None])
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
    carry, x = start(params, batch), jnp.swapaxes(x, 0, 1)  # (frames, batch, inputs)
    if remat_chunk is None:
        return jnp.swapaxes(_frames(params, carry, x)[1], 0, 1)
    if remat_chunk < 1:
        raise ValueError(f"lstm: remat_chunk must be at least 1, got {remat_chunk}")
    x = jnp.pad(x, ((0, -frames % remat_chunk), (0, 0), (0, 0)))
    chunks = x.reshape(-1, remat_chunk, batch, inputs)
    # Inside a scan XLA cannot merge the two computations: no barrier is needed.
    chunk = jax.checkpoint(partial(_frames, params), prevent_cse=False)
    _, y = lax.scan(chunk, carry, chunks)  # (chunks, remat_chunk, batch, outputs)
    y = y.reshape(len(x), batch, y.shape[-1])[:frames]
    return jnp.swapaxes(y, 0, 1)


def _frames(params: Params, carry: Carry, x: jax.Array) -> tuple[Carry, jax.Array]:
    """Takes frames, (frames, batch, inputs), through one layer after the other."""
    after = []
    for layer, state in zip(params["layers"], carry, strict=True):
        # One matmul for all frames: only the recurrent one must wait its turn.
        projected = x @ layer["w"] + layer["b"]  # (frames, batch, 4 hidden)
        recurrent = gathered(layer["recurrent"])  # once, not for each frame
        state, x = lax.scan(partial(_cell, recurrent), state, projected)
        after.append(state)
    return tuple(after), x @ params["output"]["w"] + params["output"]["b"]


def _cell(recurrent: jax.Array, state: Any, projected: jax.Array) -> Any:
    """Takes one frame's projection, (batch, 4 hidden), through one layer."""
    h, c = state
    i, f, g, o = jnp.split(projected + h @ recurrent, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h
