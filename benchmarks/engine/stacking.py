"""Seeds one after the other, against seeds stacked in one program.

`python -m benchmarks.engine.stacking` trains a few local steps of several tasks for
SEEDS seeds in both forms, compilation excluded, REPEATS times in turn, and prints the
seconds of each (minimum, median, maximum). Stacked, seeds are one more vmap axis of
model, optimizer and strategy, inside each worker.
"""

import time
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.pipeline import sampler
from experiments.tasks.task import losses
from experiments.training.components import Components, make_components
from experiments.training.config import parse
from syncalgos import DataParallel, Strategy

SEEDS, REPEATS = 4, 5
RUNS = (
    "--algo sync_sgd --workers 1 --steps 192",
    "--algo sync_sgd --steps 192",
    "--algo bmuf --steps 192",
    "--algo bmuf --task fashion_mnist --steps 64",
    "--algo bmuf --task spoken_digits --steps 32",
)


def stacked(parts: Components) -> DataParallel:
    """The engine for SEEDS runs at once: leaves of params lead with the seeds."""
    train_loss, _ = losses(parts.task)

    def loss(params, buffers, batch, key):
        # A worker's slice of a batch holds the seeds' examples in turn.
        own = jax.tree.map(lambda x: x.reshape(-1, SEEDS, *x.shape[1:]), batch)
        each = jax.vmap(train_loss, in_axes=(0, 0, 1, None))
        values, (buffers, metrics) = each(params, buffers, own, key)
        return jnp.sum(values), (buffers, metrics)

    one, inner = parts.strategy, parts.optimizer
    return DataParallel(
        loss,
        optax.GradientTransformation(jax.vmap(inner.init), jax.vmap(inner.update)),
        Strategy(
            init=jax.vmap(one.init),
            reduce=jax.vmap(one.reduce, in_axes=(0, 0, 0, None)),
            sync=jax.vmap(one.sync, in_axes=(0, 0, None)),
            center=jax.vmap(one.center),
        ),
        workers=parts.config.workers,
    )


def train(trainer: DataParallel, parts: Components, model, rows: np.ndarray) -> float:
    """Returns the seconds of the steps, in dispatches of the task's length."""
    state, data = trainer.init(*model), trainer.place(parts.data.train)
    length, start = parts.config.dispatch_steps, time.perf_counter()
    compiled = trainer.compile_seconds
    for first in range(0, len(rows), length):
        state, metrics = trainer.run(state, rows[first : first + length], data)
        jax.block_until_ready(metrics)
    return time.perf_counter() - start - (trainer.compile_seconds - compiled)


def compare(words: str) -> dict[str, list[float]]:
    """Returns the seconds of all seeds in both forms, REPEATS times in turn."""
    parts = make_components(parse(words.split()))
    s, at_once = parts.config, stacked(parts)
    models = [parts.task.init(jax.random.key(seed)) for seed in range(SEEDS)]
    rows = [
        sampler.rows(seed, 0, s.steps, s.batch_size, parts.data.examples)
        for seed in range(SEEDS)
    ]
    model = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    mixed = np.stack(rows, axis=-1).reshape(s.steps, -1)

    def in_turn() -> float:
        pairs = zip(models, rows, strict=True)
        return sum(train(parts.trainer, parts, *pair) for pair in pairs)

    pairs = [
        (in_turn(), train(at_once, parts, model, mixed)) for _ in range(REPEATS + 1)
    ]
    apart, stacks = map(list, zip(*pairs[1:], strict=True))  # the first compiles
    return {"in turn": apart, "stacked": stacks}


def main() -> None:
    """Prints a row for each of the RUNS."""
    print("| run | in turn, s | stacked, s | stacked / in turn |")
    print("|---|---|---|---|")
    for words in RUNS:
        found = compare(words)
        cells = [
            ", ".join(f"{f(x):.2f}" for f in (min, median, max)) for x in found.values()
        ]
        ratios = [b / a for a, b in zip(*found.values(), strict=True)]
        print(f"| `{words}` | {' | '.join(cells)} | {median(ratios):.2f} |", flush=True)


if __name__ == "__main__":
    main()
