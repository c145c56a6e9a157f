"""A study's command line, checked: all that can be refused before jax is there."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from experiments.cli import flags
from experiments.cli.errors import BadRequest
from experiments.cli.library import checks
from experiments.study import config, network, presets, spec
from experiments.study.network import Network
from experiments.study.report import events
from experiments.study.search_space import MOST_RUNS, as_words
from experiments.study.spec import Spec
from experiments.training.config import parse


class Study(NamedTuple):
    """A command line, checked.

    Attributes:
        spec: which runs there are.
        seeds: of those that are reported.
        networks: on which time is modelled.
        own: the flags of the study.
        preset: where one is given.
        out: its folder.
    """

    spec: Spec
    seeds: range
    networks: list[Network]
    own: config.StudyConfig
    preset: presets.Preset | None
    out: Path


def read(argv: list[str]) -> Study:
    """Reads a command line; --help and --version print and exit.

    Raises:
        BadRequest: what is unknown or out of range, in one line.
    """
    asked, preset = config.read(argv), None
    if asked.own.preset == flags.PAPER:
        asked = asked._replace(rest=["--preset", flags.PAPER, *asked.rest])
    elif asked.own.preset is not None:
        preset = presets.load(asked.own.preset)
        asked = config.read(preset.under(argv))
    own, decided = asked.own, spec.of(asked)
    try:
        if own.tensorboard:
            events.check()
        if own.baseline is not None:
            labels = [entry.label for entry in decided.entries]
            checks.one_of("--baseline", own.baseline, labels)
        networks = [network.parse(text) for text in own.network or network.PRESETS]
    except ValueError as error:
        raise BadRequest(str(error)) from None
    _check_number(decided.runs(own.seeds))
    _check_runs(decided)
    networks, seeds = list(dict.fromkeys(networks)), range(own.seeds)
    out = own.out or _default_out(decided)
    return Study(decided, seeds, networks, own, preset, out)


def _check_number(runs: int) -> None:
    """Raises a BadRequest for more runs than anybody waits for."""
    if runs > MOST_RUNS:
        raise BadRequest(
            f"the study would make {runs:,} runs, more than {MOST_RUNS:,}: take fewer "
            "values of --tune or --sweep, or fewer seeds"
        )


def _check_runs(decided: Spec) -> None:
    """Raises a BadRequest for flags that a run refuses by themselves."""
    for entry in decided.entries:
        for value in decided.points(entry):
            swept = {decided.sweep.flag: value} if decided.sweep and value else {}
            for tuned in decided.telling(entry):
                parse([*decided.argv(entry), *as_words(swept | tuned)])


def _default_out(decided: Spec) -> Path:
    """A folder by what is compared, so that the same command finds it again."""
    content = json.dumps(spec.settings(decided), sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return Path("runs") / f"compare-{decided.task.replace(':', '.')}-{digest}"
