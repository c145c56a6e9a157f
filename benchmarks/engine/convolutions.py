"""Forms of convolution in training: `python -m benchmarks.engine.convolutions`.

LeNet's training steps by plain SGD, as vmapped lanes of one device, in three forms: the
naive one, XLA's own convolution inside a scan over the steps ("lax fused"); the same
with one dispatch a step ("lax stepwise"); and patches inside the scan ("patches
fused"). They run in turn, and each is compared with the naive one turn by turn.
"""

import argparse
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks.measure import in_turn, ratios, report, spread
from models import convolution, lenet

BATCH, LR = 32, 0.01  # of all lanes together
NAIVE = "lax fused"


def compiled(form, fused, params, batches):
    """Returns go() -> losses, (steps, lanes): each call takes the same steps."""
    steps = len(batches["y"])
    one_by_one = [jax.tree.map(lambda x, i=i: x[i], batches) for i in range(steps)]

    def loss(params, batch):
        logits = lenet.apply(params, batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses.mean()

    # A function of each form's own: of a shared one jax would keep the first trace.
    def step(params, batch):
        values, grads = jax.vmap(jax.value_and_grad(loss))(params, batch)
        return jax.tree.map(lambda p, g: p - LR * g, params, grads), values

    with mock.patch.object(lenet, "conv", form):  # while the model is traced
        if fused:
            scanned = jax.jit(lambda params, batches: lax.scan(step, params, batches))
            lowered = scanned.lower(params, batches)
        else:
            lowered = jax.jit(step).lower(params, one_by_one[0])
    if ("convolution" in lowered.as_text()) != (form is convolution.by_lax):
        raise RuntimeError(f"the program does not hold {form.__name__}")
    program = lowered.compile()

    def go_fused():
        return np.asarray(program(params, batches)[1])

    def go_stepwise():
        state, losses = params, []
        for batch in one_by_one:
            state, values = program(state, batch)
            losses.append(np.asarray(values))
        return np.stack(losses)

    return go_fused if fused else go_stepwise


def measure(lanes, steps, repeats):
    """Times the three forms in turn; returns a record of each."""
    rng = np.random.default_rng(0)
    shape = (steps, lanes, BATCH // lanes)
    batches = {
        "x": jnp.asarray(rng.normal(size=(*shape, 28, 28, 1)), jnp.float32),
        "y": jnp.asarray(rng.integers(0, 10, shape), jnp.int32),
    }
    params = jax.tree.map(
        lambda x: jnp.tile(x, (lanes, *[1] * x.ndim)), lenet.init(jax.random.key(0))
    )
    forms = {
        NAIVE: compiled(convolution.by_lax, True, params, batches),
        "lax stepwise": compiled(convolution.by_lax, False, params, batches),
        "patches fused": compiled(convolution.by_patches, True, params, batches),
    }
    expected = forms[NAIVE]()  # and each form runs once before it is timed
    for go in forms.values():
        np.testing.assert_allclose(go(), expected, rtol=1e-3)
    seconds = in_turn(forms, repeats, warmups=0)
    for name, times in seconds.items():
        yield {
            "benchmark": "convolutions",
            "form": name,
            "lanes": lanes,
            "batch_per_lane": BATCH // lanes,
            "milliseconds_per_step": spread([1e3 * s / steps for s in times]),
            "times_as_fast_as_naive": ratios(times, seconds[NAIVE]),
            "repeats": repeats,
        }


def main():
    parser = argparse.ArgumentParser(description="Forms of convolution in training.")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=16, help="steps a dispatch")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    for lanes in arguments.lanes:
        if lanes < 1 or BATCH % lanes:
            parser.error(f"--lanes must divide the batch of {BATCH}, got {lanes}")
    for lanes in arguments.lanes:
        for record in measure(lanes, arguments.steps, arguments.repeats):
            report(record)


if __name__ == "__main__":
    main()
