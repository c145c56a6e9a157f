"""The record of a shard: the values that a run needs in addition to its arrays."""

import dataclasses
import reprlib
from typing import Any

from experiments.training import json_files, records
from experiments.training.records import Progress


@dataclasses.dataclass
class Record:
    """The record of a shard. Earlier versions lacked the fields that have a default.

    Attributes:
        progress: the progress of the run until this checkpoint.
        settings: the settings that affect its results, by flag, as in JSON.
        versions: the versions of all packages that its results depend on.
        sent: bytes that each worker has sent; None if unknown.
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
    where = "its record"
    json_files.check(where, content, Record, "it")
    progress = Progress(**content["progress"])
    record = Record(**{**content, "progress": progress})
    records.check_lines(where, progress.lines)
    last = progress.lines[-1]["step"] if progress.lines else 0
    values = {**vars(record), **vars(progress)}
    amounts = ("seconds", "earlier_seconds", "sent_before", "sent")
    fitting = {
        "step": progress.step == step,
        "losses": len(progress.losses) == step - last,
        "first_loss": (progress.first_loss is None) == (step == 0),
        "resumed_at": all(0 <= x <= step for x in progress.resumed_at),
        "sent_since": 0 <= progress.sent_since <= step,
        "saved": 0 <= progress.saved <= step,
        "decided": all(
            len(pair) == 2 and 0 <= pair[0] < step and pair[1] >= 0
            for pair in progress.decided
        ),
        "run_id": progress.run_id == record.run_id,
        **{name: (values[name] or 0) >= 0 for name in amounts},
    }
    for name, fits in fitting.items():
        if not fits:
            shown = reprlib.repr(values[name])
            raise json_files.Damaged(where, f"{name!r} cannot be {shown}")
    return record
