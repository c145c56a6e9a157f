"""Makes one study: the missing runs, then the report."""

import hashlib
import json
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments import exit_codes
from experiments.checkpoint import lock
from experiments.cli import exits, terminal
from experiments.cli.errors import BadRequest
from experiments.cli.words import literal
from experiments.study.analysis import analysis, remarks
from experiments.study.config import PROGRAM, StudyConfig
from experiments.study.grid import Lines, Loader, RunSet, run_sets
from experiments.study.report import events, write
from experiments.study.runner import check_measure, make_runs
from experiments.training import records
from experiments.training.prepared import versions

NAME = "study.json"


def run(
    config: StudyConfig, argv: Sequence[str], asked_to_stop: exits.Stopped
) -> int | None:
    """Makes the missing runs, then the report of all.

    Returns:
        The exit code; None if it was asked to stop.

    Raises:
        BadRequest: impossible flags, in one line.
    """
    try:
        records.check_writable(config.folder)
        with lock.held(config.folder):
            return _make(config, argv, asked_to_stop)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    except OSError as error:
        # Such as a full disk. What is done is not made again.
        where = f"{error.filename}: " if error.filename else ""
        terminal.say(
            f"error: {where}{error.strerror or error}: what is done is kept, the same "
            "command goes on from there"
        )
        return exit_codes.TERMINATED


def _make(
    config: StudyConfig, argv: Sequence[str], asked_to_stop: exits.Stopped
) -> int | None:
    """Makes a study's files, and shows the summary; returns as `run` does."""
    out, identity = config.folder, _identity(config)
    # All that can be refused is, before anything of an old study is removed.
    _check_folder(out, identity, config.overwrite)
    loader = Loader()
    planned = run_sets(config, loader)
    check_measure(planned, loader, config.measure, config.target)
    _open_folder(out, identity, config.overwrite)
    made = make_runs(planned, loader, config.measure, asked_to_stop)
    if made is None:
        return None
    # A report is a function of the files alone: those just made are read again, too.
    runs = [each.read() for each in made]
    command = shlex.join([*PROGRAM.split(), *argv])
    found = analysis.report(config, runs, command)
    records.write_lines(out / "metrics.jsonl", study_lines(runs))
    write.write(found, out)
    if config.tensorboard:
        events.write_events(out / "tensorboard", named_lines(runs, out))
    terminal.show(remarks.summary(found, out))
    return exit_codes.DONE


def study_lines(runs: Iterable[RunSet]) -> Iterator[dict[str, Any]]:
    """Yields every line of every run, with its variant and seed, for a table."""
    for r in runs:
        flag, _, value = r.point.partition("=")
        own = {"label": r.variant.label, "algo": r.variant.algo}
        own |= {flag: literal(value)} if flag else {}
        for seed, lines in r.lines.items():
            yield from ({**own, "seed": seed, **line} for line in lines)


def named_lines(runs: Iterable[RunSet], out: Path) -> Iterator[tuple[str, Lines]]:
    """Yields the lines of each run with its name, which is its folder in the study."""
    for r in runs:
        for seed, lines in r.lines.items():
            yield str(r.run(seed).relative_to(out / "runs")), lines


def _identity(config: StudyConfig) -> dict[str, Any]:
    """Returns the content of study.json, on which a folder and its study agree."""
    own = _own_code((config.task, *(variant.algo for variant in config.variants)))
    # As JSON has it, so that it can be compared with what is read.
    content = {"settings": config.identity, "versions": {**versions(), **own}}
    return json.loads(json.dumps(content))


def _own_code(names: Iterable[str]) -> dict[str, str]:
    """Returns the SHA-256 of the user's own modules, as their versions."""
    # Runs of an edited algorithm must not be mixed with those before.
    found = {}
    for name in names:
        module = name.partition(":")[0]
        if ":" in name and (origin := sys.modules[module].__file__):
            found[module] = hashlib.sha256(Path(origin).read_bytes()).hexdigest()
    return found


def _check_folder(out: Path, identity: dict[str, Any], overwrite: bool) -> None:
    """Raises a ValueError if the folder holds something other than this study."""
    path = out / NAME
    if not path.exists() and _content(out):
        raise ValueError(f"--out {out} holds something else: take another folder")
    if overwrite or not path.exists():
        return
    try:
        there = records.read_json(path)
        differing = [key for key, x in identity.items() if there.get(key) != x]
    except (ValueError, AttributeError):
        raise ValueError(
            f"{path} cannot be read: take another --out, or --overwrite"
        ) from None
    if differing:
        key = differing[0]
        raise ValueError(
            f"--out {out} holds a study of other {key} "
            f"({_changed(there.get(key), identity[key])}): take another folder, or "
            "--overwrite"
        )


def _changed(old: Any, new: dict[str, Any]) -> str:
    """Returns the first two differences in words."""
    if not isinstance(old, dict):
        return f"{old!r}, not {new!r}"
    names = [name for name in new if old.get(name) != new[name]]
    return ", ".join(f"{n}: {old.get(n)!r}, not {new[n]!r}" for n in names[:2])


def _open_folder(out: Path, identity: dict[str, Any], overwrite: bool) -> None:
    """Writes study.json, after emptying the folder if asked to."""
    # `_check_folder` has seen to it that all content is a study's.
    for path in _content(out) if overwrite else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if not (out / NAME).exists():
        records.write_json(out / NAME, identity)


def _content(out: Path) -> list[Path]:
    """Returns all entries of a folder but the lock."""
    return [path for path in out.iterdir() if path.name != lock.NAME]
