"""The record of a shard: the values that a run needs in addition to its arrays."""

import dataclasses
from typing import Any

from experiments.training.progress import Progress


@dataclasses.dataclass
class Record:
    """The record of a shard. Earlier versions lacked the fields that have a default.

    Attributes:
        progress: the progress of the run until this checkpoint.
        settings: the settings that affect its results, by flag, as in JSON.
        versions: the versions of all packages that its results depend on.
        sent: the most bytes that a worker has sent; None if unknown.
        run_id: the id of the run; "" if it has none.
        start_id: a random id of this start or resumption; "" if it has none.
        data: the SHA-256 of the training data; "" if it has none.
    """

    progress: Progress
    settings: dict[str, Any]
    versions: dict[str, str]
    sent: float | None
    run_id: str = ""
    start_id: str = ""
    data: str = ""


def read(content: dict[str, Any], step: int) -> Record:
    """Reads the record of a shard.

    Args:
        content: the record as JSON values.
        step: the step of the shard.

    Raises:
        ValueError: a field is unknown, missing or invalid; the message is one line.
    """
    try:
        progress = Progress(**content["progress"])
        record = Record(**{**content, "progress": progress})
    except (KeyError, TypeError) as error:  # of another version
        raise ValueError(f"its record does not fit this version: {error}") from error
    if progress.step != step:
        raise ValueError(f"its record is of step {progress.step}")
    return record
