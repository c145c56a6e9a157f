"""One study from its command line to its report."""

import hashlib
import json
import shlex
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

from experiments import exits, lock, records, screen
from experiments.errors import BadRequest
from experiments.ready import versions
from experiments.study import (
    about,
    analysis,
    events,
    network,
    presets,
    request,
    runs,
    spec,
    write,
)
from experiments.study.network import Network
from experiments.study.request import Asked
from experiments.study.runner import make_runs, planned
from experiments.study.spec import Spec
from syncalgos import checks

NAME = "study.json"


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
    own: Namespace
    preset: presets.Preset | None
    out: Path


def run(asked: Asked, argv: list[str], asked_to_stop: exits.Stopped) -> int | None:
    """Makes the runs that are missing, then the report of all.

    Returns:
        The exit code; None if it was asked to stop.

    Raises:
        BadRequest: what cannot be done, in one line.
    """
    try:
        study = _study(asked, argv)
        records.check_writable(study.out)
        with lock.held(study.out):
            return _made(study, argv, asked_to_stop)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    except OSError as error:  # a full disk, say: all that is done is kept
        where = f"{error.filename}: " if error.filename else ""
        screen.say(
            f"error: {where}{error.strerror or error}: what is done is kept, the same "
            "command goes on from there"
        )
        return exits.TERMINATED


def _made(study: Study, argv: list[str], asked_to_stop: exits.Stopped) -> int | None:
    """Makes a study's files, and shows the summary; returns as `run` does."""
    _check_folder(study)
    plan = planned(study.spec, study.seeds)
    _open_folder(study)
    final = make_runs(plan, study.out, study.own.measure, asked_to_stop)
    if final is None:
        return None
    command = shlex.join([*request.PROGRAM.split(), *argv])
    made = [runs.read(point, cell) for point, cell in final]
    found = analysis.report(study, made, command)
    records.write_lines(study.out / "metrics.jsonl", runs.study_lines(made))
    write.write(found, study.out)
    if study.own.tensorboard:
        events.write_events(
            study.out / "tensorboard", runs.named_lines(made, study.out)
        )
    screen.show(about.summary(found, study.out))
    return exits.DONE


def _study(asked: Asked, argv: list[str]) -> Study:
    """Reads the flags.

    Raises:
        BadRequest: what is unknown or out of range; so does a ValueError.
    """
    preset = None
    if asked.own.preset is not None:
        preset = presets.load(asked.own.preset)
        asked = request.read(preset.under(argv))
    own = asked.own
    checks.whole("--seeds", own.seeds, least=1)
    checks.whole("--tune-seeds", own.tune_seeds, least=1)
    checks.real("--tune-share", own.tune_share, above=0, below=1)
    checks.one_of("--scale-lr", own.scale_lr, spec.SCALES)
    for flag in ("worker_batch", "step_time", "target"):
        if (value := getattr(own, flag)) is not None:
            checks.real(f"--{flag.replace('_', '-')}", value, above=0)
    if own.tensorboard:
        events.check()
    decided = spec.of(asked)
    if own.baseline is not None:
        checks.one_of("--baseline", own.baseline, [e.label for e in decided.entries])
    networks = [network.parse(text) for text in own.network or network.PRESETS]
    networks = list(dict.fromkeys(networks))
    out = own.out or _default_out(decided)
    return Study(decided, range(own.seeds), networks, own, preset, out)


def _default_out(decided: Spec) -> Path:
    """A folder by what is compared, so that the same command finds it again."""
    content = json.dumps(spec.settings(decided), sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return Path("runs") / f"compare-{decided.task.replace(':', '.')}-{digest}"


def _check_folder(study: Study) -> None:
    """Raises a ValueError if the folder holds something else than this study."""
    out = study.out
    if study.own.overwrite or not (out / NAME).exists():
        if _content(out) and not (out / NAME).exists():
            raise ValueError(f"--out {out} holds something else: take another folder")
        return
    try:
        there = json.loads((out / NAME).read_text())
        differing = [k for k, x in _identity(study).items() if there.get(k) != x]
    except (ValueError, AttributeError):
        raise ValueError(
            f"{out / NAME} cannot be read: take another --out, or --overwrite"
        ) from None
    if differing:
        key = differing[0]
        raise ValueError(
            f"--out {out} holds a study of other {key} ({_changed(there, study, key)}):"
            " take another folder, or --overwrite"
        )


def _changed(there: dict[str, Any], study: Study, key: str) -> str:
    """What differs, in short."""
    old, new = there.get(key), _identity(study)[key]
    if not isinstance(old, dict):
        return f"{old!r}, not {new!r}"
    names = [name for name in new if old.get(name) != new[name]]
    return ", ".join(f"{n}: {old.get(n)!r}, not {new[n]!r}" for n in names[:2])


def _identity(study: Study) -> dict[str, Any]:
    """What must not differ in a folder; more seeds may be asked for later."""
    content = {
        "settings": spec.settings(study.spec),
        "versions": {**versions(), **_own_code(study.spec)},
    }
    return json.loads(json.dumps(content))


def _own_code(decided: Spec) -> dict[str, str]:
    """The SHA-256 of the user's own modules: edited ones are another version."""
    found = {}
    for name in (decided.task, *(entry.algo for entry in decided.entries)):
        module = name.partition(":")[0]
        if ":" in name and (origin := sys.modules[module].__file__):
            found[module] = hashlib.sha256(Path(origin).read_bytes()).hexdigest()
    return found


def _open_folder(study: Study) -> None:
    """Empties the folder if asked so, and says what it is for."""
    if study.own.overwrite and (study.out / NAME).exists():
        for path in _content(study.out):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    if not (study.out / NAME).exists():
        records.write_json(study.out / NAME, _identity(study))


def _content(out: Path) -> list[Path]:
    """All that is in a folder but the lock."""
    return [path for path in out.iterdir() if path.name != lock.NAME]
