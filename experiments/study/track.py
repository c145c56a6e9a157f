"""The sync track: an entry, its log, and whether its claim holds.

docs/track.md has the rules; a preset for each size has the fixed settings.
"""

import hashlib
import platform
import secrets
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import isclose
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple

import jax

from experiments import files
from experiments.command import stopping, terminal
from experiments.command.errors import STOPS, BadRequest, explain
from experiments.command.words import flag_groups, flag_of, parameter
from experiments.study import config as study_config
from experiments.study.making import Maker, Refused
from experiments.study.statistics import LEVEL, ROUNDING, is_fine, spread
from experiments.tasks.task import check_model
from experiments.training import config as training
from experiments.training import machine, run_folder
from experiments.training.plan import Plan
from experiments.training.sends import from_json
from syncalgos import MeanCenter, Replica, Strategy, collectives, communication
from syncalgos.network import Sends, modelled_seconds, sends

PRESETS = "track-small", "track-wide"  # an entry's TRACK is the first if not given
SEAL = "log_sha256"  # the key of a log's checksum; `sha256` is that of its entry
MODULE = "track_entry"  # the name under which an entry's file is imported
# The flags of experiments.run that an entry may choose. All others are fixed.
CHOSEN = "steps", "lr", "schedule", "warmup_steps", "weight_decay", "clip_norm"
CHOSEN += "optimizer", "momentum", "b1", "b2", "sync_until", "opt_state_at_sync"
# The parameter of the task that draws other test examples.
UNSEEN = "test_seed"
# Seeds for checks; none of them is logged or used for tuning.
FRESH = range(10_000, 1_000_000)
# The fraction by which sends of other seeds may differ, if the data decide on syncs.
TOLERANCE = 0.05
# The keys of a log. Each of its runs has figures and a seed; `found`, its claim, has
# the mean figures, and a p that tests if the mean accuracy is above the target.
LOG = "target", "words", "code", "sha256", "versions", "commit", "found", "runs"

Log = dict[str, Any]
# Accuracy and bytes of a run, or of several; seconds by link, as the track models them.
Figures = dict[str, Any]


class Entry(NamedTuple):
    """An entry, read and checked.

    Attributes:
        identity: the part of its log that follows from its file and the rules.
        config: the config of its runs, except for the seed.
        track: the fixed settings.
    """

    identity: dict[str, Any]
    config: training.RunConfig
    track: study_config.StudyConfig


def run(path: Path, stopped: Callable[[], int]) -> int:
    """Trains an entry from all seeds, and writes its log; returns the exit code.

    Raises:
        BadRequest: the rules do not allow the entry.
        OSError: the log cannot be written.
        Stopped: it was asked to stop.
    """
    entry, out = read_entry(path), path.with_suffix(".json")
    if out.exists():
        read_log(out)  # only a log is replaced
    try:
        files.try_to_write(path.parent)
    except OSError as error:
        raise BadRequest(f"{path.parent}: {error.strerror}") from error
    rows = runs(entry, range(entry.track.seeds), stopped)
    found = figures(rows, entry.track.target)
    code = {"versions": _versions(), "commit": machine.commit()}
    log = {**entry.identity, **code, "found": found, "runs": rows}
    terminal.show(shown(found))  # first: its runs have taken minutes
    files.write_json(out, log, seal=SEAL)
    done = stopping.decide(stopping.DONE)
    terminal.show(f"log    {out}")
    return done


def verify(path: Path, first_seed: int | None, stopped: Callable[[], int]) -> int:
    """Trains an entry again, and says whether its claim holds: exit code 0, or 1.

    Raises:
        BadRequest: the entry or the log cannot be read.
        Stopped: it was asked to stop.
    """
    entry = read_entry(path)
    log, doubts = claimed(entry, path.with_suffix(".json"))
    terminal.show(f"claim  {shown(log['found'])}")
    if not doubts:
        logged, count = [row["seed"] for row in log["runs"]], entry.track.seeds
        first = secrets.choice(FRESH) if first_seed is None else first_seed
        if first < len(logged):
            least = f"--first-seed must be at least {len(logged)}"
            raise BadRequest(f"{least}: lower seeds are logged, got {first}")
        again = runs(entry, logged, stopped)
        terminal.show(f"logged {repeated(log, again)}")
        seeds = range(first, first + count)
        found = figures(runs(unseen(entry, first), seeds, stopped), entry.track.target)
        terminal.show(f"now    {shown(found)}, seeds {first} to {seeds[-1]}")
        doubts = [*contradicted(log, again, found)]
    code = stopping.decide(stopping.FAILED if doubts else stopping.DONE)
    ending = "does not hold" if doubts else "holds"
    terminal.show("\n".join([*(f"doubt  {x}" for x in doubts), ending]))
    return code


def unseen(entry: Entry, seed: int) -> Entry:
    """Returns an entry that is evaluated on test examples that no entry has seen."""
    known = entry.config.task_arguments
    own = {**known, UNSEEN: seed} if UNSEEN in known else known
    return entry._replace(config=replace(entry.config, task_arguments=own))


def read_entry(path: Path) -> Entry:
    """Reads an entry, and runs its file.

    Raises:
        BadRequest: the file is not an entry, or sets a fixed flag.
    """
    # As runs do: soon jax runs, and keeps its devices.
    machine.use_cpu_devices(machine.cores())
    try:
        code = path.read_bytes().decode()
        module = ModuleType(MODULE)
        exec(compile(code, str(path), "exec"), vars(module))
        own = shlex.split(getattr(module, "FLAGS", ""))
        name = getattr(module, "TRACK", PRESETS[0])
    except STOPS:
        raise
    except BaseException as error:  # whatever the file raises
        raise explain(str(path), error) from error
    sys.modules[MODULE] = module
    if name not in PRESETS:
        raise BadRequest(f"{path}: TRACK must be {' or '.join(PRESETS)}, got {name!r}")
    track = study_config.parse(["--preset", name])
    fixed = ["--task", track.task, *chain(*track.shared)]
    for flag, *_ in flag_groups(own):
        if parameter(flag) not in CHOSEN:
            chosen = ", ".join(map(flag_of, CHOSEN))
            raise BadRequest(f"{path}: an entry cannot set {flag}, only {chosen}")
    words = ["--algo", f"{MODULE}:strategy", *fixed, *own]
    config, most = training.parse(words), training.parse(fixed).steps
    if config.steps and most and config.steps > most:
        raise BadRequest(f"{path}: --steps must be at most {most}, got {config.steps}")
    identity = {"target": track.target, "words": words, "code": code}
    identity["sha256"] = hashlib.sha256(code.encode()).hexdigest()
    return Entry(identity, config, track)


def read_log(path: Path) -> Log:
    """Reads a log; raises a BadRequest if the file is not one."""
    return files.read(path, *LOG, seal=SEAL)


def claimed(entry: Entry, path: Path) -> tuple[Log, list[str]]:
    """Reads the log of an entry, and how it contradicts the entry, the rules or itself.

    Raises:
        BadRequest: the log cannot be read or used.
    """
    log = read_log(path)
    with files.using(path):
        doubts = [*contradictions(entry, log)]
        # Uses all that is read after new runs, so that none is made in vain.
        _ = shown(log["found"]), repeated(log, log["runs"])
        _ = [*contradicted(log, log["runs"], log["found"])]
    return log, doubts


def runs(
    entry: Entry, seeds: Iterable[int], stopped: Callable[[], int]
) -> list[Figures]:
    """Makes the runs of an entry, all by the same programs.

    Raises:
        BadRequest: a run fails, or the bytes that it sends cannot be counted.
        Stopped: it was asked to stop.
    """
    maker, rows = Maker(), []
    shipped = center_sends(maker.plan(entry.config)[0])
    with TemporaryDirectory() as folder:
        for seed in seeds:
            config, out = replace(entry.config, seed=seed), Path(folder, f"seed-{seed}")
            news = maker.make(config, out, lambda news: None, stopped)
            if isinstance(news, Refused):
                raise BadRequest(news.line)
            terminal.say(f"seed {seed}: {news.words}")
            made = run_folder.read_run(out)
            assert made is not None  # it was made just now
            rows.append(row_of(entry, made.summary, shipped))
    return rows


def center_sends(plan: Plan) -> Sends:
    """Returns the sends that make the evaluated model, once.

    The engine takes the mean of the center over the workers, and does not count it.
    Without this count a strategy could average for free.
    """
    strategy = plan.method.strategy
    center = strategy.center

    def ship(replica: Replica, state: Any, step: Any) -> tuple[Replica, Any]:
        params = center(replica.params, state)
        if type(center) is not MeanCenter or center != MeanCenter():
            params = collectives.mean(params)
        return replica._replace(params=params), state

    params, _ = check_model(plan.task, 0)
    once = Strategy(init=strategy.init, sync=ship)
    return sends(communication(once, params, workers=plan.config.workers, steps=1))


def row_of(entry: Entry, summary: Mapping[str, Any], shipped: Sends) -> Figures:
    """Returns the figures of a run.

    Raises:
        BadRequest: the bytes that it sends are not counted.
    """
    if summary["sends"] is None:
        raise BadRequest("the bytes that this entry sends cannot be counted: no score")
    t, c, sent = entry.track, entry.config, from_json(summary["sends"])
    how = c.workers, t.step_time or 0.0, summary["sends"]["delay"], t.fused
    seconds = {}
    for link in t.networks:
        last = modelled_seconds(shipped, link, c.workers, 0.0, fused=t.fused)
        clock = modelled_seconds(sent, link, *how, c.sync_until)
        seconds[link.name] = float(clock[-1] + last[-1])
    size = summary["bytes_per_worker"]
    if summary["diverged"]:  # it stopped, but would have sent what its seconds are of
        size = _bytes(sent)
    return {
        "seed": summary["seed"],
        "test_accuracy": summary["test_accuracy"] if is_fine(summary) else None,
        "bytes_per_worker": size + _bytes(shipped),
        "seconds": seconds,
        "params_sha256": summary["params_sha256"],
    }


def _bytes(sent: Sends) -> float:
    return sum(x for kind in sent.steps for x, _ in sent.kinds[kind].values())


def figures(rows: Sequence[Figures], target: float | None) -> Figures:
    """Returns the figures of runs; one that diverged has an accuracy of 0."""
    values, p = [row["test_accuracy"] or 0.0 for row in rows], 1.0
    if len({*values}) > 1:  # equal figures show nothing about chance
        from scipy.stats import ttest_1samp  # takes half a second

        found: Any = ttest_1samp(values, target, alternative="greater")
        p = float(found.pvalue)
    links, (mean, deviation, _) = rows[0]["seconds"], spread(values)
    return {
        **{"test_accuracy": mean, "deviation": deviation, "p": p},
        "bytes_per_worker": fmean(row["bytes_per_worker"] for row in rows),
        "seconds": {x: fmean(row["seconds"][x] for row in rows) for x in links},
    }


def contradictions(entry: Entry, log: Log) -> Iterator[str]:
    """Yields how a log contradicts its entry, the rules or itself."""
    for name, x in entry.identity.items():
        if log[name] != x:
            yield f"{name} in the log differs from the entry under today's rules"
    rows, links = log["runs"], [x.name for x in entry.track.networks]
    count = entry.track.seeds
    if [row["seed"] for row in rows] != [*range(count)]:
        yield f"the seeds of the log are not 0 to {count - 1}"
    elif odd := [row["seed"] for row in rows if {*row["seconds"]} != {*links}]:
        yield f"the seconds of seed {odd[0]} are not those on {', '.join(links)}"
    else:
        yield from differences(log["found"], figures(rows, entry.track.target))


def contradicted(log: Log, again: Sequence[Figures], found: Figures) -> Iterator[str]:
    """Yields how new runs of the logged seeds, and of others, contradict a log."""
    for was, now in zip(log["runs"], again, strict=True):
        # Other versions and machines round differently, and train other params.
        is_same = was["params_sha256"] == now["params_sha256"]
        if is_same or log["versions"] == _versions():
            yield from (f"seed {was['seed']}: {x}" for x in differences(was, now))
    varies = len({row["bytes_per_worker"] for row in again}) > 1
    keys = "bytes_per_worker", "seconds"
    was, now = ({key: x[key] for key in keys} for x in (log["found"], found))
    yield from differences(was, now, TOLERANCE if varies else ROUNDING)
    for which, p in (("logged", log["found"]["p"]), ("these", found["p"])):
        if p >= LEVEL:
            yield f"{which} seeds do not show a mean above the target, p = {p:.2g}"


def differences(
    logged: Mapping[str, Any], now: Mapping[str, Any], tolerance: float = ROUNDING
) -> Iterator[str]:
    """Yields the figures that differ by more than a fraction `tolerance`."""
    for name in {**now, **logged}:
        x, y = logged.get(name), now.get(name)
        if isinstance(x, dict) and isinstance(y, dict):
            yield from differences(x, y, tolerance)
            continue
        is_same = x == y
        if isinstance(x, int | float) and isinstance(y, int | float):
            is_same = isclose(x, y, rel_tol=tolerance)
        if not is_same:
            yield f"{name} is {x} in the log, and {y} here"


def repeated(log: Log, again: Sequence[Figures]) -> str:
    """Returns how many logged seeds gave the same bits, and which versions differ."""
    both = zip(log["runs"], again, strict=True)
    same = sum(was["params_sha256"] == now["params_sha256"] for was, now in both)
    was, here = log["versions"], _versions().items()
    changed = [f"{k} {was.get(k)}, here {x}" for k, x in here if was.get(k) != x]
    how = "; ".join(changed) or "the same versions"
    return f"{same} of {len(again)} seeds come out bit-equal ({how})"


def shown(found: Figures) -> str:
    """Returns figures as text."""
    mean, deviation = 100 * (found["test_accuracy"] or 0), found["deviation"] or 0
    times = ", ".join(f"{x:.3g} s on {link}" for link, x in found["seconds"].items())
    return (
        f"{mean:.1f} ± {100 * deviation:.1f} %, p = {found['p']:.2g}, "
        f"{terminal.size(found['bytes_per_worker'])} per worker, {times}"
    )


def _versions() -> dict[str, str]:
    """Returns the versions and devices, on which rounding depends."""
    devices = f"{jax.device_count()} {jax.default_backend()} of {platform.machine()}"
    return {**machine.versions(), "devices": f"{devices}, {machine.processor()}"}
