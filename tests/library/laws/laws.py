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
from compositions import (
    LR,
    NEUTRAL,
    OPTIMIZERS,
    TREES,
    choose,
    draw_expression,
    make_names,
    substitute,
)
from pages.docstrings import joined, parsed
from pages.table import FACTOR
from support.requirements import parameters

import syncalgos as sa
from syncalgos._combinators import introspection

DISPATCH = 11  # in the middle of every period, delay and accumulation
STEADY = 20 * DISPATCH
CLOSE = 1e-6  # relative; rounding of short trainings is below 1e-9


def split_words(text: str) -> set[str]:
    return {*re.findall(r"\w+", text)}


# Documented exceptions, by the names in an expression. A new algorithm has none.

# A worker's number decides what it does: pairs, groups, speeds, draws of its own.
BY_NUMBER = split_words(
    """noloco hierarchical halos async_diloco heloco decoupled_diloco palsgd push_sum
    fedavg sampled demo quantized_sgd sign_sgd signum distributed_lion loco int8
    sign low_bit dion zero_one_adam one_bit_adam noisy"""
)
# Only shifts of the workers leave these graphs as they are.
ON_GRAPHS = split_words(
    "gossip gossip_pga d2 gradient_tracking choco_sgd qg_dsgdm gasloc"
)
TABLES = {"FIRST_OUT", "HEAVY", "SLOW", "REST"}
# Their docstrings say that replicas do not agree, or when they stop to.
NEVER_AGREE = split_words(
    """after noloco gasloc eager_diloco async_diloco heloco halos decoupled_diloco
    dynamic_averaging until stale decided easgd overlap_local_sgd sparta choco_sgd
    qg_dsgdm delayed"""
)
# Under these, rounds come late: corrections fade by the round, and two schedules may
# never meet, of which the engine warns.
LATE = {"GROWS", "paced"}
FADING = split_words("feddyn scaffnew qsr")
# In a gate each worker takes its own gradients between two syncs.
GATES = split_words("every when until after")
GRADIENTS = split_words(
    """sync_sgd gpa ema_nesterov demo powersgd dion topk_sgd dgc ef21 sign_sgd signum
    distributed_lion one_bit_adam zero_one_adam quantized_sgd loco reduce_with"""
)
# These leave the mean of the workers where it would be without them.
MEANS = split_words(
    """sync_sgd model_averaging post_local_sgd hierarchical qsr des_loc gossip d2
    dynamic_averaging gossip_pga gradient_tracking choco_sgd sparta average every
    when until after chain masked ema at_syncs decided scaffold"""
)
# Around these a steady drift is as fast, whatever share of the workers takes part.
SAME_RATE = split_words(
    """when participating sampled ema at_end at_syncs every chain average reset"""
)
# Steps of one size or by lot, another factor in the docstring's words (co2's holds once
# it has settled), or none at all.
OTHER_RATE = split_words(
    """sign_sgd signum distributed_lion zero_one_adam one_bit_adam demo dion dgc co2
    fedopt edit halos gasloc qg_dsgdm pulseloco ema_nesterov fedprox feddyn heloco
    palsgd"""
)
# In a sum over the steps these send all of a gradient that stays.
UNBIASED = split_words("mean median trimmed error_feedback late low_bit int8 ef21")


class Composition(NamedTuple):
    """A composition, and how it is trained.

    Attributes:
        expression: in the names of `make_names`.
        workers: their number.
        optimizer: a name in OPTIMIZERS.
        tree: a name in TREES, of the params.
    """

    expression: str
    workers: int
    optimizer: str = "sgd"
    tree: str = "plain"


def draw_composition(seed: int, number: int) -> tuple[Composition, np.random.Generator]:
    """A composition by its number, and what draws its data."""
    rng = np.random.default_rng([seed, number])
    expression = draw_expression(rng, int(rng.choice([1, 2, 3])))
    workers = int(rng.choice([1, 2, 3, 4, 8], p=[0.05, 0.2, 0.2, 0.4, 0.15]))
    num_others = len(OPTIMIZERS) - 1
    probabilities = [0.4] + [0.6 / num_others] * num_others  # SGD's, and the others'
    optimizer = str(rng.choice([*OPTIMIZERS], p=probabilities))
    tree = str(rng.choice([*TREES], p=[0.8, 0.2]))
    # Prodigy's own numbers take the dtype of the first leaf it adds up.
    tree = "plain" if optimizer == "prodigy" else tree
    return Composition(expression, workers, optimizer, tree), rng


def flatten_trained(params: Any, lead: int = 0) -> Any:
    """The trained entries, (…, entries), behind so many leading axes."""
    leaves = [x for x in jax.tree.leaves(params) if x.dtype != jnp.bfloat16]
    return jnp.concatenate([x.reshape(*x.shape[:lead], -1) for x in leaves], -1)


def loss(
    params: Any, buffers: Any, batch: dict[str, jax.Array], key: jax.Array
) -> tuple[jax.Array, tuple[Any, Any]]:
    x = flatten_trained(params)
    push = batch["g"].mean()
    worker_losses = batch["c"] * (x @ x) / 2 - batch["g"] @ x
    buffers = {"seen": 0.5 * buffers["seen"] + push}
    return worker_losses.mean(), (buffers, {"push": push})


def make_batches(
    rng: np.random.Generator,
    workers: int,
    steps: int,
    curvature: float = 0.3,
    size: int = 7,
) -> dict[str, np.ndarray]:
    c = rng.uniform(0, curvature, (steps, workers))
    return {"g": rng.normal(size=(steps, workers, size)), "c": c}


def slice_batches(batches: Any, start: int, stop: int | None) -> Any:
    return {k: x[start:stop] for k, x in batches.items()}


class LawOutcome(NamedTuple):
    """What some dispatches leave.

    Attributes:
        state: on the host.
        center: the center's params and buffers.
        metrics: of all their steps, leaves (steps, …).
    """

    state: Any
    center: Any
    metrics: Any


class CompositionTrainer:
    """A composition in a trainer, with its first state on the host."""

    def __init__(
        self,
        composition: Composition,
        dispatch: int = DISPATCH,
        backend: str = "vmap",
        **placement: Any,
    ):
        names = make_names(composition.workers, composition.optimizer)
        self.strategy = eval(composition.expression, names)
        self.dispatch = dispatch
        self.trainer = sa.DataParallel(
            loss,
            names["OPT"],
            self.strategy,
            workers=composition.workers,
            backend=backend,
            placement=sa.Placement(**{"lanes": composition.workers, **placement}),
        )
        rng = np.random.default_rng(7)
        params = compositions.make_params(composition.tree, rng)
        self.size = flatten_trained(params).size
        first_state = self.trainer.init(params, {"seen": np.zeros(())})
        self.first_state = self.copy_to_host(first_state)

    def copy_to_host(self, state: Any) -> Any:
        """A copy on the host that shares nothing with the trainer."""
        host = self.trainer.to_host(state)
        return jax.tree.map(lambda x: np.array(x) if is_comparable(x) else x, host)

    def train(self, batches: Any, first_state: Any = None) -> LawOutcome:
        state = self.trainer.from_host(first_state or self.first_state)
        metrics_by_dispatch = []
        for start in range(0, len(batches["c"]), self.dispatch):
            stop = start + self.dispatch
            state, metrics = self.trainer.run(
                state, slice_batches(batches, start, stop)
            )
            metrics_by_dispatch.append(jax.tree.map(np.asarray, metrics))
        return LawOutcome(
            state=self.copy_to_host(state),
            center=jax.tree.map(np.asarray, self.trainer.center(state)),
            metrics=jax.tree.map(lambda *x: np.concatenate(x), *metrics_by_dispatch),
        )

    def count_bytes(self) -> np.ndarray:
        """The bytes that a worker has sent after each step of a dispatch."""
        state = self.trainer.from_host(self.first_state)
        return self.trainer.communication(state, DISPATCH).per_step


def is_comparable(x: Any) -> bool:
    return not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def compute_gap(actual: Any, expected: Any) -> float:
    """The largest relative difference; infinite in case of another form, or NaN."""
    is_short = np.asarray(actual).dtype == jnp.bfloat16
    actual = np.asarray(actual, float)
    expected = np.asarray(expected, float)
    if actual.shape != expected.shape:
        return np.inf
    is_finite = np.isfinite(actual)
    if (is_finite != np.isfinite(expected)).any():
        return np.inf
    actual = np.where(is_finite, actual, 0)
    expected = np.where(is_finite, expected, 0)
    largest = abs(actual).max(initial=0)
    difference = abs(actual - expected).max(initial=0) / (1 + largest)
    if is_short and difference < 0.1:
        return 0.0
    return float(difference)


class Finding(NamedTuple):
    """A law, and what is wrong; "" where it holds."""

    law: str
    fault: str


def compare(
    law: str, subject: Any, actual: Any, expected: Any, tolerance: float = CLOSE
) -> Finding:
    """Finds whether two trees are equal, as a law says."""
    if jax.tree.structure(actual) != jax.tree.structure(expected):
        return Finding(law, f"{subject}: other trees")
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    gap = max((compute_gap(x, y) for x, y in pairs if is_comparable(x)), default=0)
    return Finding(law, f"{subject}: {gap:.2g}" if gap > tolerance else "")


class LawCase(NamedTuple):
    """A composition, and its training.

    Attributes:
        composition: of strategies, workers, an optimizer and params.
        rng: draws what else the laws need.
        trainer: the composition's.
        batches: of two dispatches.
        outcome: what training on them leaves.
        names: those in the expression, and the optimizer's.
    """

    composition: Composition
    rng: np.random.Generator
    trainer: CompositionTrainer
    batches: Any
    outcome: LawOutcome
    names: set[str]


def resume_law(case: LawCase) -> Iterator[Finding]:
    """A state of the host goes on, bit by bit."""
    first_batches = slice_batches(case.batches, 0, DISPATCH)
    second_batches = slice_batches(case.batches, DISPATCH, None)
    middle_state = case.trainer.train(first_batches).state
    resumed = case.trainer.train(second_batches, middle_state)
    second_metrics = slice_batches(case.outcome.metrics, DISPATCH, None)
    expected = case.outcome._replace(metrics=second_metrics)
    yield compare("resume", "bits", resumed, expected, tolerance=0)


LAYOUTS = [
    {"dispatch": 8},
    {"backend": "auto", "lane_form": "sequential"},
    {"backend": "auto", "lane_form": "vectorized"},
    {"backend": "auto", "lanes": 1},
    {"backend": "auto", "lanes": 2},
    {"backend": "shard_map", "lanes": 1},
    {"backend": "shard_map", "lanes": 2},
]
if hasattr(jax, "pmap"):
    LAYOUTS.append({"backend": "pmap", "lanes": 1})


def find_lanes(workers: int, least: int) -> int:
    """The fewest lanes, at least so many, that divide the workers and fit devices."""
    divisors = [lanes for lanes in range(least, 9) if workers % lanes == 0]
    most_devices = jax.device_count()
    return min(lanes for lanes in divisors or [1] if workers <= lanes * most_devices)


def layout_law(case: LawCase) -> Iterator[Finding]:
    """Another layout, backend or split into dispatches gives the same numbers."""
    layout = dict(case.rng.choice(LAYOUTS))
    if "lanes" in layout:
        layout["lanes"] = find_lanes(case.composition.workers, layout["lanes"])
    try:
        other_trainer = CompositionTrainer(case.composition, **layout)
        other_outcome = other_trainer.train(case.batches)
    except ValueError as error:  # not every form fits every strategy
        yield Finding("layout", "" if "lane_form" in str(error) else str(error))
        return
    yield compare("layout", layout, other_outcome, case.outcome)
    if "decided" not in case.outcome.metrics:
        sent_bytes = case.trainer.count_bytes()
        other_bytes = other_trainer.count_bytes()
        yield compare("ledger", layout, sent_bytes, other_bytes, tolerance=0)


def neutrality_law(case: LawCase, wrapper: str = "") -> Iterator[Finding]:
    """Wrappers that must change nothing change nothing."""
    wrapper = wrapper or choose(case.rng, NEUTRAL)
    expression = substitute("X", case.composition.expression, wrapper)
    wrapped_composition = case.composition._replace(expression=expression)
    try:
        wrapped_trainer = CompositionTrainer(wrapped_composition)
    except (ValueError, TypeError) as error:
        yield Finding("refusal", f"{expression}: {error}" if "\n" in str(error) else "")
        return
    wrapped = wrapped_trainer.train(case.batches)
    yield compare(
        "neutral",
        expression,
        (wrapped.state.replica, wrapped.metrics),
        (case.outcome.state.replica, case.outcome.metrics),
    )
    if "ema" not in wrapper:
        subject = f"center of {expression}"
        yield compare("neutral", subject, wrapped.center, case.outcome.center)


def equivariance_law(case: LawCase) -> Iterator[Finding]:
    """Workers in another order do the same in this order."""
    workers = case.composition.workers
    if workers < 3 or case.names & BY_NUMBER:
        return
    order = np.r_[: workers - 2, workers - 1, workers - 2]  # no table has them apart
    if case.names & ON_GRAPHS:
        order = np.roll(np.arange(workers), not case.names & TABLES)
    outcome = case.outcome
    reordered = case.trainer.train({k: x[:, order] for k, x in case.batches.items()})
    yield compare(
        "equivariance",
        order,
        (reordered.state.replica, reordered.center, reordered.metrics),
        (
            jax.tree.map(lambda x: x[order], outcome.state.replica),
            outcome.center,
            outcome.metrics,
        ),
    )


def absence_law(case: LawCase) -> Iterator[Finding]:
    """A worker of weight 0, or that rests, reaches nothing but itself."""
    names = case.names
    # Members of a chain are weighed one by one, and out of a phase all count.
    exceptions = names & {"chain", "until", "after"}
    if "REST" in names:
        # The opt_state and buffers of a worker that rests keep changing.
        exceptions |= names & {"opt_state", "buffers"}
    has_absent_worker = names & {"FIRST_OUT", "REST"} and case.composition.workers > 1
    if exceptions or not has_absent_worker:
        return
    # In a round that never ends all count.
    ends_round = jax.vmap(partial(introspection.lands, case.trainer.strategy))
    if "FIRST_OUT" in names and not ends_round(jnp.arange(1024)).any():
        return

    def select_others(outcome: LawOutcome) -> Any:
        return jax.tree.map(lambda x: x[1:], outcome.state.replica)

    outcome = case.outcome
    for poison in (1e3, np.nan):
        moves = case.batches["g"].copy()
        moves[:, 0] = poison * (1 + moves[:, 0])
        poisoned = case.trainer.train(case.batches | {"g": moves})
        yield compare("nobody", f"metrics, {poison}", poisoned.metrics, outcome.metrics)
        yield compare("nobody", f"center, {poison}", poisoned.center, outcome.center)
        yield compare(
            "nobody",
            f"others, {poison}",
            select_others(poisoned),
            select_others(outcome),
        )


def consensus_law(case: LawCase) -> Iterator[Finding]:
    """Workers that start apart, and no longer train, end in one place.

    Where all is a mean, that place is the mean of where they were.
    """
    composition = case.composition
    names = case.names
    if composition.optimizer != "sgd" or composition.tree != "plain":
        return
    batches = make_batches(case.rng, composition.workers, DISPATCH, curvature=0)
    still_batches = make_batches(case.rng, composition.workers, STEADY, curvature=0)
    still_batches["g"][:] = 0
    apart_state = case.trainer.train(batches).state
    state = case.trainer.train(still_batches, apart_state).state
    params = np.asarray(flatten_trained(state.replica.params, 1))  # (workers, entries)
    is_shared = np.full(params.shape[1], not names & {"PART", "ROWS"})
    is_shared[: 1 if "PART" in names else 5] = True
    is_late = names & LATE and names & FADING
    is_apart = names & GATES and names & GRADIENTS
    if not (names & NEVER_AGREE or is_late or is_apart):
        spread = np.ptp(params, 0)[is_shared].max(initial=0)
        disagrees = spread > 1e-5 * (1 + abs(params).max())
        yield Finding("consensus", f"spread {spread:.2g}" if disagrees else "")
    has_only_means = find_calls(composition) <= MEANS
    if has_only_means and not names & {"params", "reduce", "reducers"}:
        first_params = case.trainer.first_state.replica.params
        start = flatten_trained(first_params, 1).mean(0)
        expected = start + LR * batches["g"].mean(1).sum(0)
        mean = params.mean(0)
        yield compare("conservation", "the mean", mean, np.asarray(expected))


def drift_law(case: LawCase) -> Iterator[Finding]:
    """A steady drift moves the center as fast as the docstring says."""
    composition = case.composition
    rate = find_rate(composition)
    if rate is None or composition.optimizer != "sgd":
        return
    if case.names & {"GROWS", "ODD", "PART", "ROWS"}:
        return
    size = case.trainer.size
    batches = make_batches(
        case.rng, composition.workers, STEADY, curvature=0, size=size
    )
    batches["g"][:] = 1
    settled = case.trainer.train(batches)
    center = case.trainer.train(batches, settled.state).center
    moves = flatten_trained(center.params) - flatten_trained(settled.center.params)
    rates = np.asarray(moves) / (STEADY * LR)
    yield compare("drift", rate, rates, np.full(size, rate), tolerance=0.01)
    yield compare("drift", "buffers", center.buffers, {"seen": np.float64(2)})


def find_calls(composition: Composition) -> set[str]:
    return set(re.findall(r"(\w+)\(", composition.expression))


def find_rate(composition: Composition) -> float | None:
    """The documented factor of the only algorithm, if the rest leaves it as it is."""
    expression = composition.expression
    algorithms = re.findall(rf"\b({'|'.join(sa.ALGORITHMS)})\((.*?)\)", expression)
    if len(algorithms) != 1:
        return None
    [(name, arguments)] = algorithms
    if find_calls(composition) - {name} - SAME_RATE - UNBIASED:
        return None
    if name in OTHER_RATE or re.search("reducers|offset|stale", expression):
        return None
    settings = eval(f"dict({arguments})", {"OPT": None, "reducers": sa.reducers})
    values = parameters(name) | settings
    if values.get("reduce", "mean") not in UNBIASED:
        return None
    doc = parsed(sa.ALGORITHMS[name])
    factor = FACTOR.search(joined(" ".join(doc.notes)))
    if factor is None:
        return 1.0
    if re.search(r"\bto\b", factor[1]):  # a bound, not a factor
        return None
    default_momentum = 1 - 1 / composition.workers  # bmuf's
    symbols = {}
    for parameter, value in values.items():
        symbol = doc.parameters[parameter].split(",")[0]
        symbols[symbol] = default_momentum if value is None else value
    symbols |= {"N": composition.workers, "mean": lambda x: x}
    symbols["speed"] = (1 + values.get("slowest", 1.0)) / 2
    return float(eval(re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", factor[1]), symbols))


LAWS = [resume_law, equivariance_law, absence_law, consensus_law, drift_law]
COMPILED = [neutrality_law, layout_law]  # of another program


def choose_laws(rng: np.random.Generator) -> list[Any]:
    """All laws, but of those that compile at most one."""
    index = int(rng.integers(len(COMPILED) + 1))
    return [*LAWS, *COMPILED[index : index + 1]]


class Verdict(NamedTuple):
    """Why a composition is refused, or "", and what the laws found."""

    refusal: str
    findings: list[Finding]


def judge(
    composition: Composition, rng: np.random.Generator, laws: list[Any]
) -> Verdict:
    """Trains a composition, and asks the laws."""
    findings = []
    trainer = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of centers before the first sync
        try:
            trainer = CompositionTrainer(composition)
            batches = make_batches(
                rng, composition.workers, 2 * DISPATCH, size=trainer.size
            )
            case = LawCase(
                composition=composition,
                rng=rng,
                trainer=trainer,
                batches=batches,
                outcome=trainer.train(batches),
                names=split_words(composition.expression) | {composition.optimizer},
            )
            for law in laws:
                findings += law(case)
        except Exception as error:
            message = f"{type(error).__name__}: {str(error)[:300]}"
            if trainer is not None:
                return Verdict("", [*findings, Finding("crash", message)])
            # A strategy's own arrays that change are no words on what was asked for.
            is_clear = isinstance(error, ValueError | TypeError) and not re.search(
                "\n|must stay", str(error)
            )
            finding = Finding("refusal", "" if is_clear else message)
            return Verdict(str(error), [finding])
    return Verdict("", findings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--one", help="EXPRESSION | WORKERS | OPTIMIZER | TREE")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    words = Counter()
    kept_laws = Counter()
    broken_laws = Counter()
    start_seconds = time.process_time()
    count = 1 if arguments.one else arguments.count
    for number in range(arguments.first, arguments.first + count):
        composition, rng = draw_composition(arguments.seed, number)
        laws = choose_laws(rng)
        if arguments.one:
            expression, workers, optimizer, tree = arguments.one.split(" | ")
            composition = Composition(expression, int(workers), optimizer, tree)
            laws = LAWS + COMPILED
        verdict = judge(composition, rng, laws)
        faults = [finding for finding in verdict.findings if finding.fault]
        if faults:
            word = "broke"
        elif verdict.refusal:
            word = "refused"
        else:
            word = "held"
        words[word] += 1
        kept_laws.update({law for law, fault in verdict.findings if not fault})
        broken_laws.update({law for law, _ in faults})
        description = " | ".join(map(str, composition))
        print(f"{number} {word} {description} {verdict.refusal[:150]}")
        for law, fault in faults:
            print(f"    {law}: {fault}")
        sys.stdout.flush()
        if number % 50 == 49:  # Linux maps 65,530 areas into a process
            jax.clear_caches()
    seconds = time.process_time() - start_seconds
    print(f"seed {arguments.seed}: {dict(words)}, {seconds:.0f} s")
    print(f"laws held {dict(kept_laws)}, compositions that broke {dict(broken_laws)}")


if __name__ == "__main__":
    main()
