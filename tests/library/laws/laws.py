"""The laws of compositions, asked of random ones; each holds, or one line refuses it.

    make laws ARGS="--count 3000 --seed 0"
    make laws ARGS="--seed 0 --first 17 --count 1"
    make laws ARGS="--one 'delayed(bmuf(period=3), 2) | 4 | sgd | plain'"

The data choose the gradients: by SGD, worker w moves entry i of its params
by LR (g[step, w, i] - c[step, w] x_i). Numbers are float64, so rounding stays far below
the tolerances.
"""

import argparse
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import compositions
import jax
import jax.numpy as jnp
import numpy as np
from compositions import LR, NEUTRAL, OPTIMIZERS, TREES, drawn, filled, names, one
from pages.docstrings import joined, parsed
from pages.table import FACTOR
from support.requirements import parameters

import syncalgos as sa
from syncalgos._combinators import introspection

DISPATCH = 11  # in the middle of every period, delay and accumulation
STEADY = 20 * DISPATCH
CLOSE = 1e-6  # relative; rounding of short trainings is below 1e-9


def words(text: str) -> set[str]:
    return {*re.findall(r"\w+", text)}


# Documented exceptions, by the names in an expression. A new algorithm has none.

# A worker's number decides what it does: pairs, groups, speeds, draws of its own.
BY_NUMBER = words(
    """noloco hierarchical halos async_diloco heloco decoupled_diloco palsgd push_sum
    fedavg sampled demo quantized_sgd sign_sgd signum distributed_lion loco int8
    sign low_bit dion zero_one_adam one_bit_adam noisy"""
)
# Only shifts of the workers leave these graphs as they are.
ON_GRAPHS = words("gossip gossip_pga d2 gradient_tracking choco_sgd qg_dsgdm gasloc")
TABLES = {"FIRST_OUT", "HEAVY", "SLOW", "REST"}
# Their docstrings say that replicas do not agree, or when they stop to.
NEVER_AGREE = words(
    """after noloco gasloc eager_diloco async_diloco heloco halos decoupled_diloco
    dynamic_averaging until stale decided easgd overlap_local_sgd sparta choco_sgd
    qg_dsgdm delayed"""
)
# Under these, rounds come late: corrections fade by the round, and two schedules may
# never meet, of which the engine warns.
LATE = {"GROWS", "paced"}
FADING = words("feddyn scaffnew qsr")
# In a gate each worker takes its own gradients between two syncs.
GATES = words("every when until after")
GRADIENTS = words(
    """sync_sgd gpa ema_nesterov demo powersgd dion topk_sgd dgc ef21 sign_sgd signum
    distributed_lion one_bit_adam zero_one_adam quantized_sgd loco reduce_with"""
)
# These leave the mean of the workers where it would be without them.
MEANS = words(
    """sync_sgd model_averaging post_local_sgd hierarchical qsr des_loc gossip d2
    dynamic_averaging gossip_pga gradient_tracking choco_sgd sparta average every
    when until after chain masked ema at_syncs decided scaffold"""
)
# Around these a steady drift is as fast, whatever share of the workers takes part.
SAME_RATE = words(
    """when participating sampled ema at_end at_syncs every chain average reset"""
)
# Steps of one size or by lot, another factor in the docstring's words (co2's holds once
# it has settled), or none at all.
OTHER_RATE = words(
    """sign_sgd signum distributed_lion zero_one_adam one_bit_adam demo dion dgc co2
    fedopt edit halos gasloc qg_dsgdm pulseloco ema_nesterov fedprox feddyn heloco
    palsgd"""
)
# In a sum over the steps these send all of a gradient that stays.
WHOLE = words("mean median trimmed error_feedback late low_bit int8 ef21")


class Drawn(NamedTuple):
    """A composition, and how it is trained."""

    expression: str
    workers: int
    optimizer: str
    tree: str


def draw(seed: int, number: int) -> tuple[Drawn, np.random.Generator]:
    """A composition by its number, and what draws its data."""
    rng = np.random.default_rng([seed, number])
    expression = drawn(rng, int(rng.choice([1, 2, 3])))
    workers = int(rng.choice([1, 2, 3, 4, 8], p=[0.05, 0.2, 0.2, 0.4, 0.15]))
    often = [0.4, *[0.6 / (len(OPTIMIZERS) - 1)] * (len(OPTIMIZERS) - 1)]
    optimizer = str(rng.choice([*OPTIMIZERS], p=often))
    tree = str(rng.choice([*TREES], p=[0.8, 0.2]))
    # Prodigy's own numbers take the dtype of the first leaf it adds up.
    tree = "plain" if optimizer == "prodigy" else tree
    return Drawn(expression, workers, optimizer, tree), rng


def flat(params: Any, lead: int = 0) -> Any:
    """The trained entries, (…, entries), behind so many leading axes."""
    kept = [x for x in jax.tree.leaves(params) if x.dtype != jnp.bfloat16]
    return jnp.concatenate([x.reshape(*x.shape[:lead], -1) for x in kept], -1)


def loss(params, buffers, batch, key):
    x = flat(params)
    push = batch["g"].mean()
    each = batch["c"] * (x @ x) / 2 - batch["g"] @ x
    return each.mean(), ({"seen": 0.5 * buffers["seen"] + push}, {"push": push})


def data(rng, workers, steps, curvature=0.3, size=7):
    c = rng.uniform(0, curvature, (steps, workers))
    return {"g": rng.normal(size=(steps, workers, size)), "c": c}


def cut(batches, start, stop):
    return {k: x[start:stop] for k, x in batches.items()}


class Trained:
    """A composition in a trainer, with its first state on the host."""

    def __init__(self, drawn, dispatch=DISPATCH, backend="vmap", **placed):
        expression, workers, optimizer, tree = drawn
        given = names(workers, optimizer)
        placed = {"lanes": workers, **placed}
        made = self.strategy = eval(expression, given)
        self.dispatch = dispatch
        self.trainer = sa.DataParallel(
            loss,
            given["OPT"],
            made,
            workers=workers,
            backend=backend,
            placement=sa.Placement(**placed),
        )
        params = compositions.tree(tree, np.random.default_rng(7))
        self.size = flat(params).size
        self.start = self.held(self.trainer.init(params, {"seen": np.zeros(())}))

    def held(self, state):
        """A copy on the host that shares nothing with the trainer."""
        host = self.trainer.to_host(state)
        return jax.tree.map(lambda x: np.array(x) if is_plain(x) else x, host)

    def train(self, batches, start=None):
        """The state on the host, the center, and metrics, after some dispatches."""
        state = self.trainer.from_host(start or self.start)
        found = []
        for i in range(0, len(batches["c"]), self.dispatch):
            state, metrics = self.trainer.run(state, cut(batches, i, i + self.dispatch))
            found.append(jax.tree.map(np.asarray, metrics))
        center = jax.tree.map(np.asarray, self.trainer.center(state))
        metrics = jax.tree.map(lambda *x: np.concatenate(x), *found)
        return self.held(state), center, metrics


def is_plain(x: Any) -> bool:
    return not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def gap(x: Any, y: Any) -> float:
    """The largest relative difference; infinite in case of another form, or NaN."""
    short = np.asarray(x).dtype == jnp.bfloat16
    x = np.asarray(x, float)
    y = np.asarray(y, float)
    if x.shape != y.shape or (np.isfinite(x) != np.isfinite(y)).any():
        return np.inf
    x, y = (np.where(np.isfinite(each), each, 0) for each in (x, y))
    found = abs(x - y).max(initial=0) / (1 + abs(x).max(initial=0))
    return float(0 if short and found < 0.1 else found)


Found = tuple[str, str]
"""A law, and what is wrong; "" where it holds."""


def same(law: str, what: Any, one: Any, other: Any, within: float = CLOSE) -> Found:
    if jax.tree.structure(one) != jax.tree.structure(other):
        return law, f"{what}: other trees"
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    wrong = max((gap(x, y) for x, y in pairs if is_plain(x)), default=0)
    return law, f"{what}: {wrong:.2g}" if wrong > within else ""


class Asked(NamedTuple):
    """A composition, and its training.

    Attributes:
        drawn: the composition.
        rng: draws what else the laws need.
        made: its trainer.
        batches: of two dispatches.
        found: the state, the center and metrics after them.
        named: the names in the expression, and the optimizer's.
    """

    drawn: Drawn
    rng: np.random.Generator
    made: Trained
    batches: Any
    found: Any
    named: set[str]


def resumed(asked: Asked) -> Iterator[Found]:
    """A state of the host goes on, bit by bit."""
    middle, *_ = asked.made.train(cut(asked.batches, 0, DISPATCH))
    end, center, metrics = asked.found
    right = end, center, cut(metrics, DISPATCH, None)
    found = asked.made.train(cut(asked.batches, DISPATCH, None), middle)
    yield same("resume", "bits", found, right, 0)


LAYOUTS = [
    {"dispatch": 8},
    {"backend": "auto", "lane_form": "sequential"},
    {"backend": "auto", "lane_form": "vectorized"},
    *({"backend": name, "lanes": n} for name in ("auto", "shard_map") for n in (1, 2)),
]
if hasattr(jax, "pmap"):
    LAYOUTS.append({"backend": "pmap", "lanes": 1})


def laid_out(asked: Asked) -> Iterator[Found]:
    """Another layout, backend or split into dispatches gives the same numbers."""
    where = dict(asked.rng.choice(LAYOUTS))
    if "lanes" in where:  # no fewer than there are devices for
        fits = [n for n in range(where["lanes"], 9) if asked.drawn.workers % n == 0]
        most = jax.device_count()
        where["lanes"] = min(n for n in fits or [1] if asked.drawn.workers <= n * most)
    try:
        other = Trained(asked.drawn, **where)
        found = other.train(asked.batches)
    except ValueError as error:  # not every form fits every strategy
        yield "layout", "" if "lane_form" in str(error) else str(error)
        return
    yield same("layout", where, found, asked.found)
    if "decided" in asked.found[2]:
        return
    both = [(x.trainer, x.trainer.from_host(x.start)) for x in (asked.made, other)]
    sent = [trainer.communication(state, DISPATCH).per_step for trainer, state in both]
    yield same("ledger", where, *sent, 0)


def neutral(asked: Asked, wrapper: str = "") -> Iterator[Found]:
    """Wrappers that must change nothing change nothing."""
    wrapper = wrapper or one(asked.rng, NEUTRAL)
    wrapped = filled("X", asked.drawn.expression, wrapper)
    try:
        other = Trained(asked.drawn._replace(expression=wrapped))
    except (ValueError, TypeError) as error:
        yield "refusal", f"{wrapped}: {error}" if "\n" in str(error) else ""
        return
    end, center, metrics = asked.found
    state, its_center, seen = other.train(asked.batches)
    right = end.replica, metrics
    yield same("neutral", wrapped, (state.replica, seen), right)
    if "ema" not in wrapper:
        yield same("neutral", f"center of {wrapped}", its_center, center)


def equivariant(asked: Asked) -> Iterator[Found]:
    """Workers in another order do the same in this order."""
    workers = asked.drawn.workers
    named = asked.named
    if workers < 3 or named & BY_NUMBER:
        return
    order = np.r_[: workers - 2, workers - 1, workers - 2]  # no table has them apart
    if named & ON_GRAPHS:
        order = np.roll(np.arange(workers), not named & TABLES)
    end, center, metrics = asked.found
    state, *found = asked.made.train({k: x[:, order] for k, x in asked.batches.items()})
    right = jax.tree.map(lambda x: x[order], end.replica), center, metrics
    yield same("equivariance", order, (state.replica, *found), right)


def nobody(asked: Asked) -> Iterator[Found]:
    """A worker of weight 0, or that rests, reaches nothing but itself."""
    named = asked.named
    # Members of a chain are weighed one by one, and out of a phase all count.
    beside = named & {"chain", "until", "after"}
    # The opt_state and buffers of a worker that rests keep changing.
    beside |= named & {"opt_state", "buffers"} if "REST" in named else set()
    if asked.drawn.workers == 1 or not named & {"FIRST_OUT", "REST"} or beside:
        return
    # In a round that never ends all count.
    ends = jax.vmap(partial(introspection.lands, asked.made.strategy))
    if "FIRST_OUT" in named and not ends(jnp.arange(1024)).any():
        return

    def others(state):
        return jax.tree.map(lambda x: x[1:], state.replica)

    end, center, metrics = asked.found
    for poison in (1e3, np.nan):
        bad = asked.batches | {"g": asked.batches["g"].copy()}
        bad["g"][:, 0] = poison * (1 + bad["g"][:, 0])
        state, its_center, seen = asked.made.train(bad)
        yield same("nobody", f"metrics, {poison}", seen, metrics)
        yield same("nobody", f"center, {poison}", its_center, center)
        yield same("nobody", f"others, {poison}", others(state), others(end))


def agreed(asked: Asked) -> Iterator[Found]:
    """Workers that start apart, and no longer train, end in one place.

    Where all is a mean, that place is the mean of where they were.
    """
    (_, workers, optimizer, tree), made, named = asked.drawn, asked.made, asked.named
    if optimizer != "sgd" or tree != "plain":
        return
    moves, still = (data(asked.rng, workers, n, 0) for n in (DISPATCH, STEADY))
    still["g"][:] = 0
    end = made.train(still, made.train(moves)[0])[0]
    params = np.asarray(flat(end.replica.params, 1))
    shared = np.full(params.shape[1], not named & {"PART", "ROWS"})
    shared[: 1 if "PART" in named else 5] = True
    is_late = named & LATE and named & FADING
    is_apart = named & GATES and named & GRADIENTS
    if not (named & NEVER_AGREE or is_late or is_apart):
        spread = np.ptp(params, 0)[shared].max(initial=0)
        wrong = spread > 1e-5 * (1 + abs(params).max())
        yield "consensus", f"spread {spread:.2g}" if wrong else ""
    if called(asked.drawn) <= MEANS and not named & {"params", "reduce", "reducers"}:
        right = flat(made.start.replica.params, 1).mean(0)
        right = right + LR * moves["g"].mean(1).sum(0)
        yield same("conservation", "the mean", params.mean(0), np.asarray(right))


def steady(asked: Asked) -> Iterator[Found]:
    """A steady drift moves the center as fast as the docstring says."""
    (_, workers, optimizer, _), made, named = asked.drawn, asked.made, asked.named
    right = rate(asked.drawn)
    if right is None or optimizer != "sgd" or named & {"GROWS", "ODD", "PART", "ROWS"}:
        return
    batches = data(asked.rng, workers, STEADY, 0, made.size)
    batches["g"][:] = 1
    state, first, _ = made.train(batches)
    _, second, _ = made.train(batches, state)
    moved = np.asarray(flat(second.params) - flat(first.params)) / (STEADY * LR)
    yield same("drift", right, moved, np.full(made.size, right), 0.01)
    yield same("drift", "buffers", second.buffers, {"seen": np.float64(2)})


def called(drawn: Drawn) -> set[str]:
    return set(re.findall(r"(\w+)\(", drawn.expression))


def rate(drawn: Drawn) -> float | None:
    """The documented factor of the only algorithm, if the rest leaves it as it is."""
    text = drawn.expression
    algorithms = re.findall(rf"\b({'|'.join(sa.ALGORITHMS)})\((.*?)\)", text)
    if len(algorithms) != 1:
        return None
    [(name, given)] = algorithms
    rest = called(drawn) - {name} - SAME_RATE - WHOLE
    if rest or name in OTHER_RATE or re.search("reducers|offset|stale", text):
        return None
    own = eval(f"dict({given})", {"OPT": None, "reducers": sa.reducers})
    values = parameters(name) | own
    doc = parsed(sa.ALGORITHMS[name])
    if values.get("reduce", "mean") not in WHOLE:
        return None
    factor = FACTOR.search(joined(" ".join(doc.notes)))
    if factor is None:
        return 1.0
    if re.search(r"\bto\b", factor[1]):  # a bound, not a factor
        return None
    usual = 1 - 1 / drawn.workers  # of bmuf's momentum
    symbols = {
        doc.parameters[k].split(",")[0]: usual if x is None else x
        for k, x in values.items()
    }
    symbols |= {"N": drawn.workers, "mean": lambda x: x}
    symbols["speed"] = (1 + values.get("slowest", 1.0)) / 2
    return float(eval(re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", factor[1]), symbols))


LAWS = [resumed, equivariant, nobody, agreed, steady]
COMPILED = [neutral, laid_out]  # of another program


def some(rng: np.random.Generator) -> list[Any]:
    """All laws, but of those that compile at most one."""
    return [*LAWS, *COMPILED[(first := int(rng.integers(3))) : first + 1]]


def judge(
    drawn: Drawn, rng: np.random.Generator, laws: list[Any]
) -> tuple[str, list[Found]]:
    """Why it is refused, or "", and what the laws found."""
    found = []
    made = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of centers before the first sync
        try:
            made = Trained(drawn)
            batches = data(rng, drawn.workers, 2 * DISPATCH, size=made.size)
            named = words(drawn.expression) | {drawn.optimizer}
            asked = Asked(drawn, rng, made, batches, made.train(batches), named)
            for law in laws:
                found += law(asked)
        except Exception as error:
            what = f"{type(error).__name__}: {str(error)[:300]}"
            if made is not None:
                return "", [*found, ("crash", what)]
            # A strategy's own arrays that change are no words on what was asked for.
            clear = isinstance(error, ValueError | TypeError) and not re.search(
                "\n|must stay", str(error)
            )
            return str(error), [("refusal", "" if clear else what)]
    return "", found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, usual in (("count", 100), ("seed", 0), ("first", 0)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--one", help="EXPRESSION | WORKERS | OPTIMIZER | TREE")
    asked = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    ended = Counter()
    held = Counter()
    broke = Counter()
    began = time.process_time()
    for number in range(asked.first, asked.first + (1 if asked.one else asked.count)):
        drawn, rng = draw(asked.seed, number)
        laws = some(rng)
        if asked.one:
            expression, workers, *rest = asked.one.split(" | ")
            drawn = Drawn(expression, int(workers), *rest)
            laws = LAWS + COMPILED
        why, found = judge(drawn, rng, laws)
        wrong = [f"\n    {law}: {text}" for law, text in found if text]
        end = "broke" if wrong else "refused" if why else "held"
        ended[end] += 1
        held.update({law for law, text in found if not text})
        broke.update({law for law, text in found if text})
        print(f"{number} {end} {' | '.join(map(str, drawn))} {why[:150]}", *wrong)
        sys.stdout.flush()
        if number % 50 == 49:  # Linux maps 65,530 areas into a process
            jax.clear_caches()
    print(f"seed {asked.seed}: {dict(ended)}, {time.process_time() - began:.0f} s")
    print(f"laws held {dict(held)}, compositions that broke {dict(broke)}")


if __name__ == "__main__":
    main()
