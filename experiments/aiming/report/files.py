"""The files that a command writes, and those that it reuses."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.aiming.config import PROGRAM, AimConfig, Job
from experiments.aiming.report import tables
from experiments.aiming.report.records import Result
from experiments.cli.errors import BadRequest, Unwritten
from experiments.training import files
from experiments.training.files import write

Known = Mapping[tuple[Any, ...], dict[str, Any]]
"""Programs that were compiled earlier, by `key_of`."""


def known(config: AimConfig) -> Known:
    """Returns the compiled programs in the files of --reuse.

    Raises:
        BadRequest: a file was not written by --json, or is damaged.
    """
    programs = [x for path in config.reuse for x in _compiled(path)]
    return {
        (x["target"]["text"], x["target"]["slices"], *x["argv"]): x for x in programs
    }


def _compiled(path: Path) -> list[dict[str, Any]]:
    """Returns the compiled programs of a file, after checking them."""
    try:
        programs = files.read(path, "programs")["programs"]
        with files.using(path):
            return [_checked(path, x) for x in programs if "compile_seconds" in x]
    except OSError as error:
        raise BadRequest(f"--reuse {path}: {error.strerror or error}") from None
    except files.Damaged as error:
        raise BadRequest(f"--reuse {error}: give a file written by --json") from None


def _checked(path: Path, program: dict[str, Any]) -> dict[str, Any]:
    """Returns a program; raises a Damaged if it has no checksum, or another one."""
    files.check_seal(path, {files.SEAL: None, **program})
    return program


def key_of(job: Job) -> tuple[Any, ...]:
    """Returns the key of a program: its target and its flags."""
    return job.target.text, job.target.slices, *job.argv


def write_json(
    config: AimConfig, argv: list[str], found: Sequence[Result], known: Known
) -> None:
    """Writes the file of --json, if any; raises an Unwritten if it cannot.

    Args:
        config, argv: config and flags of the command.
        found: results of the programs so far.
        known: earlier programs, which the file keeps if --reuse names it, too.
    """
    if config.json is not None:
        reached = {key_of(x.job) for x in found}
        is_kept = config.json in config.reuse
        kept = [x for key, x in known.items() if is_kept and key not in reached]
        # One line per program, so that files can be compared.
        programs = ",\n".join(json.dumps(x) for x in [*map(as_json, found), *kept])
        command = json.dumps([*PROGRAM.split(), *argv])
        text = f'{{"command": {command},\n"programs": [\n{programs}\n]}}\n'
        _write(config.json, text)


def write_page(config: AimConfig, argv: list[str], found: Sequence[Result]) -> None:
    """Writes the page of --page, if any; raises an Unwritten if it cannot."""
    if config.page is not None:
        _write(config.page, tables.markdown(config, argv, found))


def _write(path: Path, text: str) -> None:
    try:
        if path.exists() and not path.is_file():  # such as /dev/stdout
            path.write_text(text, "utf-8")
        else:
            write(path.resolve(), text)
    except OSError as error:
        raise Unwritten(f"{path}: {error.strerror or error}") from None


def as_json(result: Result) -> dict[str, Any]:
    """Returns a result as JSON: bytes and seconds, not rounded."""
    job, target = result.job, result.job.target
    content = {
        # A reused answer has the fields below, too, of other chip data or networks.
        **result.answer,
        "target": {**target._asdict(), "chips": target.chips},
        "label": job.variant.label,
        "algo": job.variant.algo,
        "argv": job.argv,
        "is_asked": result.is_asked,
        "fits": result.fits,
        "chip_bytes": result.held,
        "modelled": result.times,
        "compared": result.comparison,
    }
    # Converted as it will be read, because the checksum is computed from that.
    return files.sealed(json.loads(json.dumps(_plain(content))))


def _plain(value: Any) -> Any:
    """Returns a value with its NamedTuples as dicts."""
    value = value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    return [*map(_plain, value)] if isinstance(value, list | tuple) else value
