"""Damaged files: each is a line with its name, and no changed value is a result."""

import json
import os
import random
import shlex
import shutil
from types import SimpleNamespace

import pytest
from studies import SMALL, compare, content, said_in_one_line
from test_study_analysis import points, study_of, write

from experiments.aiming.report import files
from experiments.cli.errors import BadRequest
from experiments.compare import main as compare_main
from experiments.run import main as run_main
from experiments.study import grid, study
from experiments.study.analysis import analysis
from experiments.study.running import cluster as connection
from experiments.training import json_files, reading, records

FEW = 60  # of many damages, in the default run
DEEP = b"[" * 100_000 + b"]" * 100_000
PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
VALUES = [None, True, -1, 0, 1.5, 10**400, 1e308, "x", "\ud800", [], [[1]], {}]
VALUES += [{"x": 1}, float("nan"), float("inf")]


def swapped(whole, value):
    """Yields JSON with one part after the other changed or left out, at any depth."""
    if isinstance(whole, dict | list):
        for key in [*whole] if isinstance(whole, dict) else range(len(whole)):
            for inner in swapped(whole[key], value):
                copy = whole.copy()
                copy[key] = inner
                yield copy
            if isinstance(whole, dict):
                yield {k: x for k, x in whole.items() if k != key}
    yield value


def damages(data, most):
    """Yields a file's content cut, flipped, foreign, deep, or of other types."""
    lines = data.splitlines(keepends=True)
    yield from (data[: len(data) * i // 12] for i in range(12))
    yield from (data[:-2], data + lines[-1], PICTURE, b"\0" * 40, b"\xff\xfe" + data)
    yield from (b"null", b"[]", b"{}", b"3", b'"x"', b"\n", b'{"a": 1}\n', b'["a"]\n')
    yield from (DEEP, b'{"settings": ' + DEEP + b"}", data.replace(b"{", b"[", 1))
    chance = random.Random(0)
    for _ in range(most):
        at = chance.randrange(len(data))
        yield data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    text = lines[-1] if lines[0].strip().endswith(b"}") else data
    changed = [json.dumps(x) for v in VALUES for x in swapped(json.loads(text), v)]
    for one in chance.sample(changed, min(most, len(changed))):
        yield data.replace(text, one.encode() + b"\n")


@pytest.fixture
def runs(tmp_path):
    """A small study, finished, as version 0.2 has written it; and its run sets."""
    made = study_of(tmp_path / "study", seeds=2)
    for each in points(made):
        for seed in each.seeds:
            write(each.run(seed), each.variant.algo, (0.5, 0.7, 0.8), seed=seed)
    return made, points(made)


@pytest.mark.parametrize("most", [FEW, pytest.param(4000, marks=pytest.mark.long)])
@pytest.mark.parametrize("is_sealed", [True, False], ids=["sealed", "of-0.2"])
@pytest.mark.parametrize("name", records.NAMES)
def test_a_run_with_a_damaged_file_is_named_and_is_not_there(
    name, is_sealed, most, runs
):
    config, sets = runs
    run = sets[1].run(1)
    whole = reading.read_run(run)
    assert whole
    if is_sealed:
        records.finish(run, whole.summary, whole.lines)
    path, data, named = run / name, (run / name).read_bytes(), 0
    for bad in damages(data, most):
        path.write_bytes(bad)
        why = grid.damage(run)
        if why:
            named += 1
            assert why.startswith(f"{run}/") and "\n" not in why
            assert sets[1].missing() == [1] and not grid.is_done(run)
        elif is_sealed and (now := reading.read_run(run)):
            # Only the names of what nobody reads may differ, and blanks.
            assert (now.config, now.lines) == (whole.config, whole.lines)
            assert all(now.summary.get(k, x) == x for k, x in whole.summary.items())
        else:  # an old file's digits cannot be checked; a report can be made of them
            found = [each.read() for each in sets]
            analysis.report(config, found, "")
            assert [*study.study_lines(found), *study.final_lines(found)]
    assert named > most / 2


@pytest.mark.parametrize("name", records.NAMES)
@pytest.mark.parametrize("place", ["missing", "folder", "pipe", "twice", "other"])
def test_what_stands_in_place_of_a_file_is_no_run(name, place, runs):
    _, sets = runs
    run = sets[1].run(1)
    whole, path = reading.read_run(run), run / name
    assert whole
    records.finish(run, whole.summary, whole.lines)
    data = path.read_bytes()
    path.unlink()
    if place == "folder":
        path.mkdir()
    elif place == "pipe":
        os.mkfifo(path)
    elif place == "twice":
        path.write_bytes(data + data)
    elif place == "other":
        shutil.copy(sets[0].run(0) / name, path)
        path.write_text(path.read_text().replace("1.2.3", "1.2.4"))
    assert not grid.is_done(run)
    is_cut_short = (name, place) == ("summary.json", "missing")
    assert bool(grid.damage(run)) is not is_cut_short


STUDY = json.dumps({"settings": {"task": "digits"}, "versions": {"jax": "0.10"}})


def test_a_folder_whose_study_json_is_damaged_is_refused_and_kept(tmp_path):
    path = tmp_path / "study.json"
    for bad in damages(STUDY.encode(), FEW):
        path.write_bytes(bad)
        for overwrite in (False, True):
            try:
                study._check_folder(tmp_path, json.loads(STUDY), overwrite)
            except ValueError as error:
                assert "\n" not in str(error) and str(tmp_path) in str(error)
            else:  # it names a study, and --overwrite says that it may go
                assert overwrite or json.loads(bad) == json.loads(STUDY)
        assert path.read_bytes() == bad


@pytest.mark.parametrize("flags", ["", "--overwrite"])
@pytest.mark.parametrize("bad", [b"", b"{}", DEEP, b"\xff", PICTURE])
def test_a_command_removes_nothing_beside_a_damaged_study_json(
    bad, flags, tmp_path, capsys
):
    (tmp_path / "study.json").write_bytes(bad)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "kept").write_text("hours of work")
    before = content(tmp_path)
    assert compare_main(shlex.split(f"--steps 3 {flags} --out {tmp_path}")) == 2
    assert f"{tmp_path}/study.json: " in said_in_one_line(capsys.readouterr().err)
    assert {k: x for k, x in content(tmp_path).items() if k in before} == before


@pytest.mark.parametrize("command", [compare_main, run_main])
@pytest.mark.parametrize("flag", ["--out", "--algos", "--algo"])
def test_what_is_no_text_is_refused_before_training(flag, command, tmp_path, capsys):
    word = f"{tmp_path}/\udcff"
    assert command([flag, word]) == 2
    line = said_in_one_line(capsys.readouterr().err)
    assert "/\\udcff' is not valid UTF-8" in line
    assert [*tmp_path.iterdir()] == []


COMPILED = {
    **{"slices": 1, "workers": 4, "mesh": {}, "lanes": 1, "batch_size": 64},
    **{"params": 2, "steps": 10, "dispatch_steps": 5, "delay": 0},
    **{"state": {"params": 8, "opt_state": 0, "sync": 0}, "largest": []},
    **{"ledger": None, "sends": {"kinds": [{}], "steps": "0*10"}, "traffic": None},
    **{"target": {"text": "cpu:4", "slices": 1}, "argv": ["--algo", "bmuf"]},
    "compile_seconds": 1.5,
}


def test_a_damaged_file_of_reuse_is_named(tmp_path):
    path = tmp_path / "found.json"
    whole = json_files.sealed(COMPILED)
    data = json.dumps({"programs": [whole]}).encode()
    for bad in damages(data, 4 * FEW):
        path.write_bytes(bad)
        try:
            found = files.known(SimpleNamespace(reuse=[path]))
        except BadRequest as error:
            assert str(error).startswith(f"--reuse {path}") and "\n" not in str(error)
        else:  # nothing is taken from it, or what was written
            for one in found.values():
                assert {k: one.get(k) for k in COMPILED} == COMPILED
    path.write_text(json.dumps({"programs": [COMPILED]}))  # of version 0.2
    assert [*files.known(SimpleNamespace(reuse=[path])).values()] == [COMPILED]


def test_a_damaged_file_of_a_scheduler_is_refused(tmp_path):
    path = tmp_path / "scheduler.json"
    data = b'{"address": "tcp://127.0.0.1:8786", "workers": {}}'
    for bad in damages(data, FEW):
        path.write_bytes(bad)
        try:
            assert isinstance(connection._address(str(path)), str)
        except BadRequest as error:
            assert str(path) in str(error) and "\n" not in str(error)


@pytest.mark.sample(0, slow=1)
@pytest.mark.parametrize("jobs", ["", "--jobs 2"])
def test_the_same_command_makes_a_damaged_run_anew(jobs, tmp_path):
    first = compare(SMALL, tmp_path / "study")
    assert first.code == 0, first.stderr
    (run,) = first.out.glob("runs/02-NBM/runs/seed-1")
    kept = content(run.with_name("seed-0"))
    before = json.loads((run / "summary.json").read_text())["params_sha256"]
    (run / "metrics.jsonl").write_bytes(b"")
    again = compare(f"{SMALL} {jobs}", first.out)
    assert again.code == 0 and "Traceback" not in again.stderr, again.stderr
    assert f"{run}/metrics.jsonl: it is empty: the run is repeated" in again.stderr
    assert json.loads((run / "summary.json").read_text())["params_sha256"] == before
    assert content(run.with_name("seed-0")) == kept
