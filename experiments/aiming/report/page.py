"""The findings as one HTML file that needs nothing else."""

import shlex
from collections.abc import Sequence

from markupsafe import Markup

from experiments.aiming.config import NOT_HERE, PROGRAM, AimConfig
from experiments.aiming.report import table
from experiments.aiming.report.records import Result, by_target, versions_of
from experiments.study.report.styles import CSS, templates


def page(config: AimConfig, argv: Sequence[str], found: Sequence[Result]) -> str:
    """Renders what was found as the text of an HTML file.

    Args:
        config: of the command.
        argv: its flags, by which it is repeated.
        found: of all programs, target by target.
    """
    return (
        templates()
        .get_template("aim.html.j2")
        .render(
            title=f"{config.task} {NOT_HERE}",
            headline=headline(found),
            targets=by_target(found),
            config=config,
            words=table,
            command=shlex.join([*PROGRAM.split(), *argv]),
            versions=versions_of(found),
            css=Markup(CSS),
        )
    )


def headline(found: Sequence[Result]) -> str:
    """Returns the page's first sentence: how many programs compile, and fit."""
    done = [x for x in found if x.is_done]
    fits = sum(x.fits is True for x in done)
    known = sum(x.fits is not None for x in done)
    line = f"{len(done)} of {len(found)} programs compile"
    return f"{line}, {fits} of {known} fit." if known else f"{line}."
