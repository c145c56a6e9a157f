"""One study from its command line to its report."""

import hashlib
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from experiments import exit_codes
from experiments.checkpoint import lock
from experiments.cli import exits, terminal
from experiments.cli.errors import BadRequest
from experiments.study import config, spec
from experiments.study.analysis import analysis, remarks, runs
from experiments.study.command import Study
from experiments.study.report import events, write
from experiments.study.runner import check_measure, make_runs, planned
from experiments.study.spec import Spec
from experiments.training import records
from experiments.training.prepared import versions

NAME = "study.json"


def run(study: Study, argv: list[str], asked_to_stop: exits.Stopped) -> int | None:
    """Makes the runs that are missing, then the report of all.

    Returns:
        The exit code; None if it was asked to stop.

    Raises:
        BadRequest: what cannot be done, in one line.
    """
    try:
        records.check_writable(study.out)
        with lock.held(study.out):
            return _made(study, argv, asked_to_stop)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    except OSError as error:  # a full disk, say: all that is done is kept
        where = f"{error.filename}: " if error.filename else ""
        terminal.say(
            f"error: {where}{error.strerror or error}: what is done is kept, the same "
            "command goes on from there"
        )
        return exit_codes.TERMINATED


def _made(study: Study, argv: list[str], asked_to_stop: exits.Stopped) -> int | None:
    """Makes a study's files, and shows the summary; returns as `run` does."""
    _check_folder(study)
    plan = planned(study.spec, study.seeds)
    check_measure(plan, study.own.measure, study.own.target)
    _open_folder(study)
    final = make_runs(plan, study.out, study.own.measure, asked_to_stop)
    if final is None:
        return None
    command = shlex.join([*config.PROGRAM.split(), *argv])
    made = [runs.read(point, cell) for point, cell in final]
    found = analysis.report(study, made, command)
    records.write_lines(study.out / "metrics.jsonl", runs.study_lines(made))
    write.write(found, study.out)
    if study.own.tensorboard:
        events.write_events(
            study.out / "tensorboard", runs.named_lines(made, study.out)
        )
    terminal.show(remarks.summary(found, study.out))
    return exit_codes.DONE


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
