"""The file and the page that a command asks for."""

import json
from collections.abc import Sequence
from typing import Any

from experiments.aiming.config import PROGRAM, AimConfig
from experiments.aiming.report import markdown
from experiments.aiming.report.records import Result
from experiments.aiming.targets import Target
from experiments.cli.errors import BadRequest


def write(config: AimConfig, argv: list[str], found: Sequence[Result]) -> None:
    """Writes what --json and --page ask for.

    Raises:
        BadRequest: it cannot be written.
    """
    try:
        if config.json is not None:
            content = {"command": [*PROGRAM.split(), *argv], "programs": []}
            content["programs"] = [as_json(x) for x in found]
            config.json.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        if config.page is not None:
            config.page.write_text(_page(config, argv, found), "utf-8")
    except OSError as error:
        raise BadRequest(f"{error.filename}: {error.strerror or error}") from None


def _page(config: AimConfig, argv: list[str], found: Sequence[Result]) -> str:
    if config.page is not None and config.page.suffix == ".md":
        return markdown.page(config, argv, found)
    from experiments.aiming.report import page  # imports jinja2

    return page.page(config, argv, found)


def as_json(result: Result) -> dict[str, Any]:
    """Returns a result as JSON has it: bytes and seconds, nothing rounded."""
    compared = result.comparison
    return {
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
        **result.answer,
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
