"""The files that a command asks for, and those that it begins from."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.aiming.config import PROGRAM, AimConfig, Job
from experiments.aiming.report import markdown
from experiments.aiming.report.records import Result
from experiments.aiming.targets import Target
from experiments.cli.errors import BadRequest
from experiments.training.records import write

Known = Mapping[tuple[Any, ...], dict[str, Any]]
"""Programs that were compiled before, by `key_of`."""


def known(config: AimConfig) -> Known:
    """Returns what the files of --reuse have of programs that were compiled.

    Raises:
        BadRequest: a file that is none of --json.
    """
    found = {}
    for path in config.reuse:
        try:
            for one in json.loads(path.read_text("utf-8"))["programs"]:
                target = one["target"]
                key = target["text"], target["slices"], *one["argv"]
                if "compile_seconds" in one:
                    found[key] = one
        except OSError as error:
            raise BadRequest(f"--reuse {path}: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError):
            raise BadRequest(f"--reuse {path}: it is no file of --json") from None
    return found


def key_of(job: Job) -> tuple[Any, ...]:
    """Returns what a program is known by: its target and its flags."""
    return job.target.text, job.target.slices, *job.argv


def write_json(
    config: AimConfig, argv: list[str], found: Sequence[Result], known: Known
) -> None:
    """Writes what --json asks for; raises a BadRequest where it cannot.

    Args:
        config, argv: of the command.
        found: of the programs so far.
        known: what a file that --reuse names, too, keeps beside them.
    """
    if config.json is not None:
        command = json.dumps([*PROGRAM.split(), *argv])
        reached = {key_of(x.job) for x in found}
        is_kept = config.json in config.reuse
        kept = [x for key, x in known.items() if is_kept and key not in reached]
        # A line each, so that files of many programs can be compared.
        programs = ",\n".join(json.dumps(x) for x in [*map(as_json, found), *kept])
        text = f'{{"command": {command},\n"programs": [\n{programs}\n]}}\n'
        _write(config.json, text)


def write_page(config: AimConfig, argv: list[str], found: Sequence[Result]) -> None:
    """Writes what --page asks for; raises a BadRequest where it cannot."""
    if config.page is not None:
        _write(config.page, _page(config, argv, found))


def _write(path: Path, text: str) -> None:
    try:
        if path.exists() and not path.is_file():  # such as /dev/stdout
            path.write_text(text, "utf-8")
        else:
            write(path.resolve(), text)
    except OSError as error:
        raise BadRequest(f"{path}: {error.strerror or error}") from None


def _page(config: AimConfig, argv: list[str], found: Sequence[Result]) -> str:
    if config.page is not None and config.page.suffix == ".md":
        return markdown.page(config, argv, found)
    from experiments.aiming.report import page  # imports jinja2

    return page.page(config, argv, found)


def as_json(result: Result) -> dict[str, Any]:
    """Returns a result as JSON has it: bytes and seconds, nothing rounded."""
    compared = result.comparison
    return {
        # An answer of --reuse has what follows, too, of other figures or networks.
        **result.answer,
        "target": _target(result.job.target),
        "label": result.job.variant.label,
        "algo": result.job.variant.algo,
        "argv": [*result.job.argv],
        "is_asked": result.is_asked,
        "fits": result.fits,
        "chip_bytes": result.held,
        "modelled": [x._asdict() for x in result.times],
        "compared": compared
        and {
            "is_equal": compared.is_equal,
            "why": [*compared.why],
            "rows": [row._asdict() for row in compared.rows],
        },
    }


def _target(target: Target) -> dict[str, Any]:
    """Returns a target with its figures and their sources."""
    return {
        **target._asdict(),
        "chips": target.chips,
        "chip": target.chip._asdict(),
        "inside": target.inside._asdict(),
        "between": target.between._asdict(),
    }
