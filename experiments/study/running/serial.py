"""Makes the missing runs of a study in this process, one after the other."""

from collections.abc import Callable

from experiments.cli.errors import BadRequest
from experiments.study.grid import Loader
from experiments.study.running.maker import Maker, Stopped
from experiments.study.running.plan import Failure, Plan, Run
from experiments.study.running.progress import StudyProgress


def make(
    plan: Plan, loader: Loader, bar: StudyProgress, asked_to_stop: Callable[[], int]
) -> None:
    """Makes all runs of a plan.

    Raises:
        Stopped: the user asked to. The present run is discarded.
        OSError: a file cannot be written; runs that are done stay.
    """
    maker = Maker(loader)
    while (share := plan.take()) is not None:
        while share.waiting:
            # Before the first run nothing would be lost: the signal ends the process.
            if bar.made and asked_to_stop():
                raise Stopped
            run = share.waiting.pop(0)
            plan.ended(share, failure=_make(run, maker, bar, asked_to_stop))
        plan.release(share)


def _make(
    run: Run, maker: Maker, bar: StudyProgress, asked_to_stop: Callable[[], int]
) -> Failure | None:
    """Makes a run; returns why it could not be made, if so."""
    line = bar.begin(run.name)
    try:
        line.end(maker.make(run.argv, run.seed, run.folder, line, asked_to_stop))
        return None
    except (Stopped, OSError):
        line.drop()
        raise
    # The others go on: of hundreds of runs one must not cost the night.
    except Exception as error:
        text, is_request = described(error)
        line.fail(text)
        return Failure(run, text, is_request)


def described(error: Exception) -> tuple[str, bool]:
    """Returns an error in one line, and whether it refuses the flags of a run."""
    text = " ".join(str(error).split())
    is_request = isinstance(error, BadRequest)
    return text if is_request else f"{type(error).__name__}: {text}", is_request
