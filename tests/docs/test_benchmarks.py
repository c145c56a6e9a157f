"""Benchmarks start and end in a table; what they time is no test."""

import argparse
import importlib
import itertools
import json
import sys

import pytest
from support.commands import ROOT, run_python
from support.tiers import tiers

from benchmarks import goodput
from benchmarks.peers import __main__ as peers

# Flags of the smallest runs, and how many records they report.
SCALE = "--workers 1 2 --repeats 1 --algos sync_sgd"
SMALLEST = {
    "scaling": ("--workers 1 2 --repeats 1 --seconds 0.01 --algos bmuf", 2),
    "sync_cost": ("--workers 2 --repeats 1 --steps 4 --algos bmuf topk_sgd", 2),
    "memory": ("--workers 2 --algos local bmuf", 2),
    "engine.mesh": ("--workers 2 --repeats 1", 1),
    "engine.mesh_memory": ("--sizes 4M --devices 1 2", 2),
    "network.published": ("", 23),
    "peers.scale": (f"{SCALE} --seconds 0", 3),  # a device, two, two processes
}


@pytest.mark.parametrize("name", [*SMALLEST, "slow_link"])
def test_a_benchmark_has_a_help(name, monkeypatch, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    flags = {x for x in SMALLEST.get(name, [""])[0].split() if x.startswith("--")}
    assert flags - {"--seconds"} <= set(capsys.readouterr().out.split())
    assert f"python -m benchmarks.{name}" in (module.__doc__ or "")


def test_a_peer_that_failed_in_the_turn_of_ctrl_c_is_left_out(monkeypatch):
    """Every other turn goes backwards."""
    entries = [
        peers.Entry(contestant, 2, [], [1]) for contestant in peers.CONTESTANTS[:4]
    ]
    attempts = []

    def attempt(entry, turn, *_):
        number = entries.index(entry)
        attempts.append((turn, number))
        if (turn, number) == (1, 1):
            raise KeyboardInterrupt
        entry.seconds.append(1.0)
        return (turn, number) not in ((0, 3), (1, 2))

    monkeypatch.setattr(peers, "attempt", attempt)
    measured_entries = peers.measure_all(entries, {}, argparse.Namespace(repeats=3))
    assert measured_entries == entries[:2]
    assert attempts == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2), (1, 1)]


@pytest.mark.parametrize("name", tiers(SMALLEST, slow=["sync_cost"]))
def test_a_small_run_reports_records_and_a_table(name):
    words, count = SMALLEST[name]
    stdout, _ = run_python(["-m", f"benchmarks.{name}", *words.split()], timeout=300)
    lines = stdout.splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    assert [record["benchmark"] for record in records] == [name.split(".")[-1]] * count
    assert sum(line.startswith("|") for line in lines) == 2 + count


def test_the_page_of_torchft_shows_the_goodput_that_was_measured():
    rows = goodput.read_rows(ROOT / "docs" / "records" / "goodput.jsonl")
    row_keys = {(row.kind, row.kills) for row in rows}
    assert row_keys == {*itertools.product(goodput.KINDS, (0, 1, 3))}
    page = (ROOT / "docs" / "torchft.md").read_text()
    assert goodput.make_table(rows) in page


def test_a_restart_is_the_next_sync_after_a_kill():
    assert goodput.find_restart([1.0, 2.5, 4.0], 2.0) == 0.5
    assert goodput.find_restart([1.0], 2.0) is None
