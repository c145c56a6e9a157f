"""Damaged files: each is a line with its name, and no changed value is a result."""

import json
import os
import random
import shlex
import shutil
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from support.study_commands import content, said_in_one_line
from test_study_analysis import points, study_of, write

from experiments import files
from experiments.aim import jobs as aim_jobs
from experiments.checkpoint.resume import check_config
from experiments.command.errors import BadRequest
from experiments.run import main as run_main
from experiments.study import jobs, runs, study
from experiments.study.main import main as compare_main
from experiments.training import config, export, run_folder
from syncalgos import Replica

FEW = 30  # of many damages, in the default run
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
    yield from (data[:-2], data + data, data + lines[-1], PICTURE, b"\0" * 40)
    yield from (b"null", b"[]", b"{}", b"3", b'"x"', b"\n", b'{"a": 1}\n', b'["a"]\n')
    yield from (DEEP, b'{"settings": ' + DEEP + b"}", data.replace(b"{", b"[", 1))
    yield b"\xff\xfe" + data
    chance = random.Random(0)
    for _ in range(most):
        at = chance.randrange(len(data))
        yield data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    text = lines[-1] if lines[0].strip().endswith(b"}") else data
    if b"data_offsets" not in data:  # which is binary
        changed = [json.dumps(x) for v in VALUES for x in swapped(json.loads(text), v)]
        for one in chance.sample(changed, min(most, len(changed))):
            yield data.replace(text, one.encode() + b"\n")


def standing(path, data):
    """Yields what may stand in a file's place, once it is there."""
    path.unlink()
    yield "nothing"
    path.mkdir()
    yield "a folder"
    path.rmdir()
    os.mkfifo(path)
    yield "a pipe"
    path.unlink()
    path.write_bytes(data)


# Kinds of files: each function writes one, and returns its path and its reader, which
# returns what the file holds as a command uses it, or raises an error.

STUDY = {"settings": {"task": "digits"}, "versions": {"jax": "0.10"}}


def of_a_run(name):
    """A file of a finished run, which a study reads."""

    def made(tmp_path):
        [_, bmuf] = points(study_of(tmp_path / "study", seeds=2))
        write(run := bmuf.run(1), "bmuf", (0.5, 0.7, 0.8), seed=1)

        def read():
            found = run_folder.read_run(run)
            why = runs.damage(run)
            assert runs.is_done(run) is (found is not None) and not why
            return found

        return run / name, read

    return made


def of_a_run_to_resume(tmp_path):
    asked = config.parse([])
    facts = {"arguments": asked.arguments, "task_arguments": asked.task_arguments}
    settings = {name: getattr(asked, name) for name in config.SETTINGS}
    path = tmp_path / "config.json"
    files.write_json(path, {"settings": settings, **facts})

    def read():
        # It keeps the run from a folder of another.
        check_config(tmp_path, asked)
        return run_folder.exported(tmp_path)

    return path, read


def of_a_study(is_sealed):
    """A study's identity, which must be that of the command."""

    def made(tmp_path):
        path = tmp_path / "study.json"
        path.write_text(json.dumps(STUDY))
        if is_sealed:
            files.write_json(path, STUDY)
        return path, lambda: study._check_folder(tmp_path, STUDY)

    return made


def of_reuse(tmp_path):
    path = tmp_path / "found.json"
    whole = [files.sealed(COMPILED | {"label": x, "argv": [x]}) for x in "ab"]
    programs = ",\n".join(map(json.dumps, whole))
    path.write_text(f'{{"command": ["python"],\n"programs": [\n{programs}\n]}}')
    return path, lambda: aim_jobs.read_earlier(SimpleNamespace(reuse=[path]))


def of_an_export(tmp_path):
    path = tmp_path / "model.safetensors"
    like = Replica({"w": jnp.arange(6.0), "b": jnp.ones(2, jnp.bfloat16)})
    export.save(path, like, {"algo": '"bmuf"', "steps": "4"})

    def read():
        params = export.start(path, like).params
        return {name: np.asarray(x).tobytes() for name, x in params.items()}

    return path, read


def of_a_scheduler(tmp_path):
    """It is Dask's own, so its address may be any text."""
    path = tmp_path / "scheduler.json"
    path.write_text('{"address": "tcp://127.0.0.1:8786", "workers": {}}')
    return path, lambda: type(jobs._address(str(path)))


COMPILED = {
    **{"slices": 1, "workers": 4, "mesh": {}, "lanes": 1, "batch_size": 64},
    **{"params": 2, "steps": 10, "dispatch_steps": 5, "delay": 0},
    **{"state": {"params": 8, "opt_state": 0, "sync": 0}, "largest": []},
    **{"ledger": None, "sends": {"kinds": [{}], "steps": "0*10"}, "traffic": None},
    **{"target": {"text": "cpu:4", "slices": 1}, "compile_seconds": 1.5},
}
KINDS = {
    **{name: of_a_run(name) for name in run_folder.NAMES},
    "config.json to resume": of_a_run_to_resume,
    "study.json": of_a_study(True),
    "study.json of 0.3": of_a_study(False),
    "json of aim": of_reuse,
    "export": of_an_export,
    "scheduler file": of_a_scheduler,
}
LOOSE = "of 0.3"  # it has no checksum: any sound answer may do


def refused(read, path):
    """Reads a damaged file; returns None if it was refused in a line with its name."""
    try:
        return (read(),)
    except (BadRequest, ValueError) as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        names = path.name, str(path.parent), "was made with --"
        assert any(name in str(error) for name in names), error
        return None


@pytest.mark.filterwarnings("ignore")  # numbers in a file of 0.3 may overflow
@pytest.mark.parametrize("most", [FEW, pytest.param(4000, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_refused_in_a_line_or_holds_what_was_written(
    kind, most, tmp_path, record_property
):
    path, read = KINDS[kind](tmp_path)
    whole = read()
    data = path.read_bytes()
    tried = 0
    found = 0
    for bad in damages(data, most):
        path.write_bytes(bad)
        answer = refused(read, path)
        tried = tried + 1
        found += answer is None
        assert path.read_bytes() == bad  # nothing is removed after a failed read
        if answer and LOOSE not in kind:
            # Of a file with several programs, those that are left out are not taken.
            same = answer[0] == whole or (
                kind == "json of aim" and answer[0].items() <= whole.items()
            )
            assert same or (kind in run_folder.NAMES and answer[0] is None), bad[:500]
    for _ in standing(path, data):
        answer = refused(read, path)
        tried = tried + 1
        found += answer is None
        assert answer is None or answer[0] in (None, whole)
    assert read() == whole and found > tried / 2
    record_property("damaged files", f"{kind}: {tried} tried, {found} refused")


def test_a_run_with_the_files_of_another_seed_is_no_run(tmp_path):
    [_, bmuf] = points(study_of(tmp_path / "study", seeds=2))
    for seed in bmuf.seeds:
        write(bmuf.run(seed), "bmuf", (0.5, 0.7, 0.8 - seed / 100), seed=seed)
    for name in run_folder.NAMES:
        path = bmuf.run(1) / name
        whole = path.read_bytes()
        shutil.copy(bmuf.run(0) / name, path)
        # Both seeds have one configuration.
        assert bool(runs.damage(bmuf.run(1))) is (name != "config.json")
        path.write_bytes(whole)
    shutil.copytree(bmuf.run(0), bmuf.run(1), dirs_exist_ok=True)
    assert "it belongs to seed 0" in runs.damage(bmuf.run(1))


@pytest.mark.parametrize("kind", ["summary.json", "json of aim"])
def test_a_file_whose_checksum_was_taken_out_is_refused(kind, tmp_path):
    """Version 0.3 wrote one in each of these."""
    path, read = KINDS[kind](tmp_path)
    whole = json.loads(path.read_text())
    for one in whole.get("programs", [whole]):
        del one[files.SEAL]
    path.write_text(json.dumps(whole))
    assert refused(read, path) is None


@pytest.mark.parametrize("bad", [b"", b"{}"])
def test_a_command_removes_nothing_beside_a_damaged_study_json(bad, tmp_path, capsys):
    (tmp_path / "study.json").write_bytes(bad)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "kept").write_text("hours of work")
    before = content(tmp_path)
    assert compare_main(shlex.split(f"--steps 3 --out {tmp_path}")) == 2
    assert f"{tmp_path}/study.json: " in said_in_one_line(capsys.readouterr().err)
    assert {k: x for k, x in content(tmp_path).items() if k in before} == before


@pytest.mark.parametrize(
    ("command", "flag"), [(compare_main, "--out"), (run_main, "--algo")]
)
def test_what_is_no_text_is_refused_before_training(flag, command, tmp_path, capsys):
    assert command([flag, f"{tmp_path}/\udcff"]) == 2
    said = said_in_one_line(capsys.readouterr().err)
    assert "/\\udcff' is not valid UTF-8" in said
    assert [*tmp_path.iterdir()] == []
