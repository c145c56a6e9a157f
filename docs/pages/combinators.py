"""Makes the table of docs/tables/combinators.txt that says which combinator takes what.

python -m pages.combinators

Each combinator is put around each strategy, and a step is traced: nothing is trained.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import syncalgos as sa
from pages import table, traffic

PAGE = Path(__file__).parents[1] / "tables" / "combinators.txt"
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
PARAMS = {"body": np.zeros((3, 2)), "head": np.zeros(())}
PERIOD = 8

AROUND: dict[str, Callable[[sa.Strategy], sa.Strategy]] = {
    "every": lambda s: sa.every(s, PERIOD),
    "when": lambda s: sa.when(s, _odd),
    "until": lambda s: sa.until(s, 16),
    "after": lambda s: sa.after(s, 16),
    "at_end": lambda s: sa.at_end(s, 60),
    "masked": lambda s: sa.masked(s, {"body": True, "head": False}),
    "delayed": lambda s: sa.delayed(s, 1),
    "delayed(…, arrival='add')": lambda s: sa.delayed(s, 1, arrival="add"),
    "delayed(…, alpha=0.5)": lambda s: sa.delayed(s, 1, alpha=0.5),
    "decided": lambda s: sa.decided(s, _asks),
    "ema": lambda s: sa.ema(s, 0.9),
    "participating": lambda s: sa.participating(s, sa.sampled(0.5)),
    "participating(…, stale=True)": lambda s: sa.participating(
        s, sa.sampled(0.5), stale=True
    ),
    "paced": lambda s: sa.paced(s, [1, 2, 4, 8]),
    "at_syncs": lambda s: sa.at_syncs(s, sa.average("opt_state")),
    "chain": lambda s: sa.chain(s, sa.every(sa.average("opt_state"), PERIOD)),
}


def _odd(step):
    return step % 2 == 1


def _asks(replica, state, step):
    return jax.tree.leaves(replica.params)[0].max() > 1


def strategies() -> dict[str, Callable[[], sa.Strategy]]:
    """Makers of each algorithm, with its defaults, and of each kind of composition."""
    averaged = sa.model_averaging(PERIOD)
    return {name: partial(_algorithm, name) for name in sa.ALGORITHMS} | {
        "average()": sa.average,
        "average('opt_state')": lambda: sa.average("opt_state"),
        **{
            f"{name}(model_averaging(8))": partial(make, averaged)
            for name, make in AROUND.items()
            if name not in ("every", "when", "chain") and "…" not in name
        },
        "chain(until(sync_sgd(), 8), after(model_averaging(8), 8))": lambda: sa.chain(
            sa.until(sa.sync_sgd(), 8), sa.after(averaged, 8)
        ),
    }


def _algorithm(name: str) -> sa.Strategy:
    make = sa.ALGORITHMS[name]
    return make(**({"learning_rate": 0.1} if traffic.needs_rate(make) else {}))


def cells(name: str) -> list[str]:
    """Why each combinator refuses a strategy; "" where it takes it."""
    return [refusal(around, strategies()[name]) for around in AROUND.values()]


def refusal(
    around: Callable[[sa.Strategy], sa.Strategy], make: Callable[[], sa.Strategy]
) -> str:
    """Returns the words of a refusal, or "".

    Raises:
        AssertionError: the refusal has more than one line.
    """
    try:
        trace(around(make()))
    except ValueError as error:
        assert "\n" not in str(error), error
        return refusal_reason(str(error))
    return ""


def trace(strategy: sa.Strategy) -> None:
    """Traces a step of four workers."""

    def step(params, grads, number):
        opt_state = OPTIMIZER.init(params)
        state = strategy.init(params)
        replica = sa.Replica(params, opt_state, (), jnp.zeros(()))
        grads, state = strategy.reduce(grads, replica, state, number)
        replica, state = strategy.sync(replica, state, number)
        return grads, strategy.center(replica.params, state)

    sizes = [*zip(sa.WORKERS, (2, 2), strict=True)]
    jax.make_jaxpr(step, axis_env=sizes)(PARAMS, PARAMS, jnp.int32(0))


def refusal_reason(message: str) -> str:
    """The reason of a refusal: what is wrong, without what to do instead."""
    reason = message.split(": ")[1] if ": " in message else message
    reason = re.sub(
        r"^.* (is not a mean over the workers).*", r"a part of it \1", reason
    )
    return re.sub(r" \(see .*\)$", "", reason)


def filled(page: str) -> str:
    """Returns the text of the page with the table between its marks."""
    return table.MARKED.sub(lambda _: format_table(), page)


def format_table() -> str:
    """The table and its notes; strategies and combinators of equal cells share one."""
    rows = {name: cells(name) for name in strategies()}
    notes = [*dict.fromkeys(filter(None, chain.from_iterable(rows.values())))]
    columns = joined(AROUND, [*zip(*rows.values(), strict=True)])
    positions = [[*AROUND].index(group[0]) for group in columns]
    heads = map(format_names, columns)
    lines = [["strategy", *heads], ["---"] * (1 + len(columns))]
    for group in joined(rows, [tuple(row) for row in rows.values()]):
        line = [format_names(group)]
        for position in positions:
            reason = rows[group[0]][position]
            line.append(f"no ({notes.index(reason) + 1})" if reason else "yes")
        lines.append(line)
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return text + "\n" + "".join(f"{i}. {x}\n" for i, x in enumerate(notes, 1))


def format_names(names: Iterable[str]) -> str:
    """Names as code, in one cell."""
    return ", ".join(f"`{name}`" for name in names)


def joined(names: Iterable[str], values: Iterable[tuple[str, ...]]) -> list[list[str]]:
    """Names in groups of equal values."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, value in zip(names, values, strict=True):
        groups.setdefault(value, []).append(name)
    return [*groups.values()]


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
