"""Studies of the command line as real processes, and their files, for the tests."""

import csv
import json
import os

from experiments.training import run_folder
from support.commands import CACHE, COMPARE, TIMEOUT, execute, load

LONGER = 5 * TIMEOUT  # a study is several runs
LENGTHS = "--steps 32 --eval-every 16 --step-time 0.001"
SMALL = f"--algos 'sync_sgd, NBM=bmuf --nesterov' --period 8 --seeds 2 {LENGTHS}"


def compare(command, out, limit=None):
    """Runs a study; limit is the most that a file may hold, in units of 1024 bytes."""
    if limit is None:
        return execute(command, out, COMPARE, LONGER)
    program = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash", *COMPARE]
    # It would leave programs cut short to the other tests.
    return execute(command, out, program, LONGER, **{CACHE: "false"})


def table(out):
    """The lines of table.csv by label."""
    with (out / "table.csv").open(encoding="utf-8", newline="") as file:
        return {line["algorithm"]: line for line in csv.DictReader(file)}


def metrics(out):
    """The lines of metrics.jsonl."""
    text = (out / "metrics.jsonl").read_text("utf-8")
    return [load(line) for line in text.splitlines()]


def but_for_times(out):
    """The content that two studies of one command share."""
    lines = metrics(out)
    for line in lines:
        line.pop("seconds", None)
    names = ("report.html", "table.md", "table.csv", "study.json")
    texts = {name: (out / name).read_text("utf-8") for name in names}
    normalized_texts = {name: x.replace(str(out), "OUT") for name, x in texts.items()}
    return {"metrics.jsonl": lines, **normalized_texts}


def content(folder):
    """Every file below a folder: its bytes, and when it was written."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: (path.read_bytes(), os.stat(path).st_mtime_ns) for path in files}


def change(run, **values):
    """Changes what a run has measured, as if it had been written so."""
    summary = json.loads((run / "summary.json").read_text()) | values
    *lines, last_line = map(
        json.loads, (run / "metrics.jsonl").read_text().splitlines()
    )
    last_line |= {key: x for key, x in values.items() if key in last_line}
    run_folder.finish(run, summary, [*lines, last_line])


def runs_done(out):
    """The folders of the runs that are done."""
    return sorted(path.parent for path in out.rglob("seed-*/summary.json"))


def said_in_one_line(stderr):
    """The last line of stderr, which is the one error there."""
    assert "Traceback" not in stderr
    lines = stderr.splitlines()
    assert [line for line in lines if line.startswith("error:")] == lines[-1:]
    return lines[-1]
