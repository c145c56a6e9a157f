"""Compares forms of training several settings: `python -m benchmarks.engine.settings`.

Eight learning rates of one algorithm with 8 workers train in one call, on resident
data, in two forms: one setting after the other inside the program, and with settings as
another axis of vmap. Each form is compared, within a turn, with separate calls for the
settings; compilation is excluded. A ratio above 1 means that the form is faster than
the separate calls.
"""

import argparse
from collections.abc import Callable

import jax
import numpy as np
import optax

import syncalgos
from benchmarks.measure import in_turn, ratios, report, spread, table_of
from benchmarks.work import WORK, Work, mlp_loss
from models import mlp
from syncalgos import DataParallel, Placement

FORMS = "sequential", "vectorized"
ALGORITHMS = {"sync_sgd": syncalgos.sync_sgd, "bmuf": lambda: syncalgos.bmuf(16)}
COLUMNS = {"model": "model", "algorithm": "algorithm", **{x: x for x in FORMS}}
RATES = np.geomspace(1e-4, 1e-2, 8)


def _digits() -> Work:
    """Returns the perceptron of the default run, with 8 examples per worker."""
    params = mlp.init(jax.random.key(0), (64, 128, 128, 10))
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(1437, 64)), "y": rng.integers(0, 10, 1437)}
    data = {"x": data["x"].astype(np.float32), "y": data["y"].astype(np.int32)}
    return Work(mlp_loss, params, data, 8, 48)


MODELS = {"digits": _digits, **WORK}


def calls(
    work: Work, algorithm: str, form: str | None
) -> Callable[[], list[jax.Array]]:
    """Returns a function that trains all settings for a dispatch.

    Args:
        work: the training work.
        algorithm: one of ALGORITHMS.
        form: one of FORMS; None makes a call for each setting.
    """
    trainer = DataParallel(
        work.loss,
        lambda numbers: optax.sgd(numbers["lr"]),
        ALGORITHMS[algorithm](),
        hyperparams={"lr": RATES[0]},
        placement=Placement(setting_form=form),
    )
    data = trainer.place(work.data)
    shape = work.steps, trainer.workers * work.batch
    rows = np.random.default_rng(0).integers(0, work.examples, shape, np.int32)
    grids = [{"lr": RATES}] if form else [{"lr": lr} for lr in RATES]
    states = [trainer.init(work.params, hyperparams=grid) for grid in grids]

    def call() -> list[jax.Array]:
        losses = []
        for i, state in enumerate(states):
            states[i], metrics = trainer.run(state, rows, data)
            losses.append(metrics["loss"])
        return jax.block_until_ready(losses)

    return call


def main() -> None:
    """Prints a record for each model and algorithm, and a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["digits", "mlp", "gpt"])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    records = []
    for model in arguments.models:
        work = MODELS[model]()
        for algorithm in ALGORITHMS:
            runs = {str(form): calls(work, algorithm, form) for form in (None, *FORMS)}
            seconds = in_turn(runs, arguments.repeats)
            apart = seconds["None"]
            record = {"model": model, "algorithm": algorithm, "seconds": spread(apart)}
            found = {form: ratios(seconds[form], apart) for form in FORMS}
            records.append(report(record | found))
    print(table_of(COLUMNS, records))


if __name__ == "__main__":
    main()
