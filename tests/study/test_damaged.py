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
from support.stored_runs import list_run_sets, read_study, write_run
from support.study_commands import content, said_in_one_line

from experiments import files
from experiments.aim import jobs as aim_jobs
from experiments.checkpoint.resume import check_config
from experiments.command.errors import BadRequest
from experiments.run import main as run_main
from experiments.study import jobs, runs, study
from experiments.study.main import main as compare_main
from experiments.training import config, export, run_folder
from syncalgos import Replica

DEFAULT_DAMAGES = 30  # of many damages, in the default run
DEEP = b"[" * 100_000 + b"]" * 100_000
PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
VALUES = [None, True, -1, 0, 1.5, 10**400, 1e308, "x", "\ud800", [], [[1]], {}]
VALUES += [{"x": 1}, float("nan"), float("inf")]


def swapped(value_tree, replacement):
    """Yields JSON with one part after the other changed or left out, at any depth."""
    if isinstance(value_tree, dict | list):
        for key in (
            [*value_tree] if isinstance(value_tree, dict) else range(len(value_tree))
        ):
            for changed_child in swapped(value_tree[key], replacement):
                copy = value_tree.copy()
                copy[key] = changed_child
                yield copy
            if isinstance(value_tree, dict):
                yield {k: x for k, x in value_tree.items() if k != key}
    yield replacement


def damages(data, max_flips):
    """Yields a file's content cut, flipped, foreign, deep, or of other types."""
    lines = data.splitlines(keepends=True)
    yield from (data[: len(data) * i // 12] for i in range(12))
    yield from (data[:-2], data + data, data + lines[-1], PICTURE, b"\0" * 40)
    yield from (b"null", b"[]", b"{}", b"3", b'"x"', b"\n", b'{"a": 1}\n', b'["a"]\n')
    yield from (DEEP, b'{"settings": ' + DEEP + b"}", data.replace(b"{", b"[", 1))
    yield b"\xff\xfe" + data
    chance = random.Random(0)
    for _ in range(max_flips):
        position = chance.randrange(len(data))
        yield (
            data[:position]
            + bytes([data[position] ^ 1 << chance.randrange(8)])
            + data[position + 1 :]
        )
    text = lines[-1] if lines[0].strip().endswith(b"}") else data
    if b"data_offsets" not in data:  # which is binary
        changed_texts = []
        for value in VALUES:
            changed_texts += map(json.dumps, swapped(json.loads(text), value))
        num_changes = min(max_flips, len(changed_texts))
        for changed_text in chance.sample(changed_texts, num_changes):
            yield data.replace(text, changed_text.encode() + b"\n")


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


def make_run_file(name):
    """A file of a finished run, which a study reads."""

    def make(tmp_path):
        [_, bmuf] = list_run_sets(read_study(tmp_path / "study", seeds=2))
        run = bmuf.seed_folder(1)
        write_run(run, "bmuf", (0.5, 0.7, 0.8), seed=1)

        def read():
            answer = run_folder.read_run(run)
            why = runs.damage(run)
            assert runs.is_done(run) is (answer is not None) and not why
            return answer

        return run / name, read

    return make


def make_resumable_config(tmp_path):
    run_config = config.parse([])
    facts = {
        "arguments": run_config.arguments,
        "task_arguments": run_config.task_arguments,
    }
    settings = {name: getattr(run_config, name) for name in config.SETTINGS}
    path = tmp_path / "config.json"
    files.write_json(path, {"settings": settings, **facts})

    def read():
        # It keeps the run from a folder of another.
        check_config(tmp_path, run_config)
        return run_folder.find_export(tmp_path)

    return path, read


def make_study_file(is_sealed):
    """A study's identity, which must be that of the command."""

    def make(tmp_path):
        path = tmp_path / "study.json"
        path.write_text(json.dumps(STUDY))
        if is_sealed:
            files.write_json(path, STUDY)
        return path, lambda: study._check_folder(tmp_path, STUDY)

    return make


def make_reuse_file(tmp_path):
    path = tmp_path / "found.json"
    programs_read = [files.seal(COMPILED | {"label": x, "argv": [x]}) for x in "ab"]
    programs = ",\n".join(map(json.dumps, programs_read))
    path.write_text(f'{{"command": ["python"],\n"programs": [\n{programs}\n]}}')
    return path, lambda: aim_jobs.read_earlier(SimpleNamespace(reuse=[path]))


def of_an_export(tmp_path):
    path = tmp_path / "model.safetensors"
    like = Replica({"w": jnp.arange(6.0), "b": jnp.ones(2, jnp.bfloat16)})
    export.save(path, like, {"algo": '"bmuf"', "steps": "4"})

    def read():
        params = export.read_start(path, like).params
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
    **{name: make_run_file(name) for name in run_folder.NAMES},
    "config.json to resume": make_resumable_config,
    "study.json": make_study_file(True),
    "study.json of 0.3": make_study_file(False),
    "json of aim": make_reuse_file,
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
@pytest.mark.parametrize(
    "max_damages", [DEFAULT_DAMAGES, pytest.param(4000, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_refused_in_a_line_or_holds_what_was_written(
    kind, max_damages, tmp_path, record_property
):
    path, read = KINDS[kind](tmp_path)
    intact_value = read()
    data = path.read_bytes()
    num_damages = 0
    num_refused = 0
    for bad in damages(data, max_damages):
        path.write_bytes(bad)
        answer = refused(read, path)
        num_damages = num_damages + 1
        num_refused += answer is None
        assert path.read_bytes() == bad  # nothing is removed after a failed read
        if answer and LOOSE not in kind:
            # Of a file with several programs, those that are left out are not taken.
            is_intact = answer[0] == intact_value or (
                kind == "json of aim" and answer[0].items() <= intact_value.items()
            )
            assert is_intact or (kind in run_folder.NAMES and answer[0] is None), bad[
                :500
            ]
    for _ in standing(path, data):
        answer = refused(read, path)
        num_damages = num_damages + 1
        num_refused += answer is None
        assert answer is None or answer[0] in (None, intact_value)
    assert read() == intact_value and num_refused > num_damages / 2
    record_property(
        "damaged files", f"{kind}: {num_damages} tried, {num_refused} refused"
    )


def test_a_run_with_the_files_of_another_seed_is_no_run(tmp_path):
    [_, bmuf] = list_run_sets(read_study(tmp_path / "study", seeds=2))
    for seed in bmuf.seeds:
        write_run(
            bmuf.seed_folder(seed), "bmuf", (0.5, 0.7, 0.8 - seed / 100), seed=seed
        )
    for name in run_folder.NAMES:
        path = bmuf.seed_folder(1) / name
        intact_bytes = path.read_bytes()
        shutil.copy(bmuf.seed_folder(0) / name, path)
        # Both seeds have one configuration.
        assert bool(runs.damage(bmuf.seed_folder(1))) is (name != "config.json")
        path.write_bytes(intact_bytes)
    shutil.copytree(bmuf.seed_folder(0), bmuf.seed_folder(1), dirs_exist_ok=True)
    assert "it belongs to seed 0" in runs.damage(bmuf.seed_folder(1))


@pytest.mark.parametrize("kind", ["summary.json", "json of aim"])
def test_a_file_whose_checksum_was_taken_out_is_refused(kind, tmp_path):
    """Version 0.3 wrote one in each of these."""
    path, read = KINDS[kind](tmp_path)
    document = json.loads(path.read_text())
    for record in document.get("programs", [document]):
        del record[files.SEAL]
    path.write_text(json.dumps(document))
    assert refused(read, path) is None


@pytest.mark.parametrize("bad", [b"", b"{}"])
def test_a_command_removes_nothing_beside_a_damaged_study_json(bad, tmp_path, capsys):
    (tmp_path / "study.json").write_bytes(bad)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "kept").write_text("hours of work")
    old_files = content(tmp_path)
    assert compare_main(shlex.split(f"--steps 3 --out {tmp_path}")) == 2
    assert f"{tmp_path}/study.json: " in said_in_one_line(capsys.readouterr().err)
    assert {k: x for k, x in content(tmp_path).items() if k in old_files} == old_files


@pytest.mark.parametrize(
    ("command", "flag"), [(compare_main, "--out"), (run_main, "--algo")]
)
def test_what_is_no_text_is_refused_before_training(flag, command, tmp_path, capsys):
    assert command([flag, f"{tmp_path}/\udcff"]) == 2
    error = said_in_one_line(capsys.readouterr().err)
    assert "/\\udcff' is not valid UTF-8" in error
    assert [*tmp_path.iterdir()] == []
