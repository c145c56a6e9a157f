"""Runs whose workers are several devices: --mesh."""

import dataclasses
import json
import os
import re
import shutil
import signal

import jax
import pytest
from jax.sharding import PartitionSpec as P
from support.commands import COMPARE, execute
from support.faults import commands
from support.kills import in_training
from support.resumed_runs import (
    OURS,
    assert_near,
    assert_same_end,
    refused,
    run,
    signal_before,
)
from support.small_tasks import SMALL, make, task_folder
from support.tiers import tiers
from support.tiny_tasks import shared

from experiments.checkpoint import shards
from experiments.tasks.task import Task, check_axes
from experiments.training.config import RunConfig, parse
from experiments.training.export import load
from experiments.training.summary import params_sha256

TINY = "--task support.tiny_tasks:shared --optimizer adam --workers 2 --steps 11"
TINY += " --batch-size 12 --eval-every 4 --checkpoint-every 3 --algo bmuf --period 4"
RULED_TASK = f"--task {__name__}:ruled"
STOP = 8  # the look that stops a run after seven steps


# The flag


def test_mesh_is_read_by_axis_in_order():
    config = parse(["--mesh", "fsdp=2,tensor=4"])
    assert [*(config.mesh or {}).items()] == [("fsdp", 2), ("tensor", 4)]
    assert config.worker_devices == 8
    assert parse([]).mesh is None and parse([]).worker_devices == 1
    with pytest.raises(TypeError):
        config.mesh["fsdp"] = 3  # pyright: ignore


def test_a_config_made_in_python_is_checked_alike():
    with pytest.raises(ValueError, match="must map axes to sizes"):
        RunConfig(mesh={})
    with pytest.raises(ValueError, match="must be an identifier"):
        dataclasses.replace(parse([]), mesh={"a b": 2})


def test_devices_that_a_process_needs():
    config = parse(["--workers", "4", "--mesh", "fsdp=2,tensor=2"])
    assert config.mesh_devices() == 16
    assert config.mesh_devices(processes=2) == 8
    assert parse([]).mesh_devices() == 0


# Rules


def specs(task, sizes):
    """The spec of each leaf of a task's params."""
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    spec_by_path = {}
    for place, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = jax.tree_util.keystr(place, simple=True, separator="/")
        spec_by_path[path] = leaf.shape, task.shardings(path, leaf.shape, sizes)
    return spec_by_path


RULED = [("digits", {}), ("mnist", {"model": "mlp"})]
RULED += [("spoken_digits", {}), ("shakespeare", {}), ("gpt2_synthetic", {})]


@pytest.mark.parametrize(("name", "flags"), RULED)
def test_fsdp_shards_each_matrix_and_nothing_else(name, flags):
    stacked = {"blocks": 1} if name in ("shakespeare", "gpt2_synthetic") else {}
    for path, (shape, spec) in specs(make(name, **flags), {"fsdp": 2}).items():
        matrix_shape = shape[stacked.get(path.split("/")[0], 0) :]
        if len(matrix_shape) == 1:
            assert {*spec} <= {None}, path
            continue
        entries = [*spec][len(shape) - 2 :]
        assert entries.count("fsdp") == 1, path
        assert matrix_shape[entries.index("fsdp")] == max(
            x for x in matrix_shape if x % 2 == 0
        ), path


def test_what_an_axis_does_not_divide_stays_whole():
    spec_by_path = specs(make("digits"), {"fsdp": 5})
    assert spec_by_path["2/w"] == ((128, 10), P(None, "fsdp"))
    assert spec_by_path["0/w"] == ((64, 128), P(None, None))


def test_tensor_shards_heads_and_hidden_units():
    spec_by_path = specs(make("shakespeare"), {"fsdp": 2, "tensor": 2})
    assert {
        path: spec for path, (shape, spec) in spec_by_path.items() if any(spec)
    } == {
        "tokens": P(None, "fsdp"),  # of 65 characters
        "positions": P("fsdp", None),
        "blocks/qkv/w": P(None, "fsdp", "tensor"),
        "blocks/out/w": P(None, "tensor", "fsdp"),
        "blocks/up/w": P(None, "fsdp", "tensor"),
        "blocks/down/w": P(None, "tensor", "fsdp"),
    }
    with pytest.raises(ValueError, match="tensor=4 does not divide the 2 heads"):
        specs(make("shakespeare"), {"tensor": 4})


def test_the_error_of_a_task_without_rules_names_all_that_have():
    ruled = {name for name in SMALL if make(name).shardings is not None}
    for name in ruled:
        check_axes(name, make(name), {"fsdp": 2})
    for name in SMALL.keys() - ruled:
        with pytest.raises(ValueError, match=f"task {name} has no rules") as refused:
            check_axes(name, make(name), {"fsdp": 2})
        listed_tasks = str(refused.value).partition("have:")[2]
        assert {*re.findall(r"\w+", listed_tasks)} & SMALL.keys() == ruled


# Refused before data is read, or anything compiles

RULES = {
    "nothing": lambda path, shape, sizes: None,
    "foreign": lambda path, shape, sizes: P("tensor"),  # another axis
    "raising": lambda path, shape, sizes: sizes["other"],
    "whole": lambda path, shape, sizes: P(),
}


def ruled(rule: str) -> Task:
    """A task with a rule of ours."""
    return shared()._replace(shardings=RULES[rule])


REFUSED = {
    "--mesh fsdp": ["such as fsdp=2,tensor=2", "got 'fsdp'"],
    "--mesh =2": ["names and sizes of axes"],
    "--mesh fsdp=2,fsdp=2": ["each name once"],
    "--mesh fsdp=0": ["fsdp", "at least 1, got 0"],
    "--mesh lanes=2": ["'lanes' is a reserved name"],
    "--mesh fsdp=2 --backend pmap": [
        "--backend pmap",
        "--mesh needs --backend shard_map",
    ],
    "--mesh fsdp=2 --devices 0,1": ["leave out --devices"],
    "--task digits --mesh tensor=2": ["task digits has rules for fsdp, not"],
    "--task support.tiny_tasks:endless --mesh fsdp=2": ["endless has no rules"],
    "--task digits --mesh fsdp=4": ["4 devices", "there are 3", "smaller mesh"],
    "--task digits --workers 2 --mesh fsdp=2 --batch-size 6": [
        *("3 examples do not divide over 2 parts", "multiple of 4, such as 4")
    ],
    f"{RULED_TASK} --rule nothing --mesh fsdp=2": ["PartitionSpec", "'bias'", "None"],
    f"{RULED_TASK} --rule foreign --mesh fsdp=2": [
        *("axis in shardings of 'bias'", "'tensor'")
    ],
    f"{RULED_TASK} --rule raising --mesh fsdp=2": ["KeyError", "test_mesh_runs.py:"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_mesh_that_cannot_be_is_refused_in_a_line(words, tmp_path):
    line = refused(words, tmp_path / "out")
    for text in REFUSED[words]:
        assert text in line


# Runs


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run without a mesh; not to be changed."""
    return run(TINY, tmp_path_factory.mktemp("plain") / "out")


@pytest.fixture(scope="module")
def meshed(tmp_path_factory):
    """The same with workers of two devices; not to be changed."""
    return run(f"{TINY} --mesh fsdp=2", tmp_path_factory.mktemp("meshed") / "out")


@pytest.mark.slow
def test_an_own_task_trains_as_without_a_mesh(plain, meshed):
    assert_near(meshed, plain)
    assert "2 workers of 2 devices (fsdp 2) on 2 cpu devices × 2 lanes" in meshed.stderr
    facts = meshed.config
    assert facts["mesh"] == facts["settings"]["mesh"] == {"fsdp": 2}
    assert facts["backend"] == "shard_map"
    assert (plain.config["mesh"], plain.config["backend"]) == ({}, "pmap")
    without = plain.summary
    assert without["device_bytes"] == without["device_bytes_without_mesh"]
    assert without["bytes_per_device"] == without["bytes_per_worker"]
    assert "a device holds" not in plain.stdout


@pytest.mark.slow
def test_summary_has_the_bytes_of_a_device(tmp_path):
    short = "--steps 1 --period 1 --eval-every 1 --checkpoint-every 1"
    meshed = run(f"{TINY} {short} --mesh fsdp=2", tmp_path / "out")
    params_bytes = 4 * (4 * 6 + 6 + 6 * 4)  # of params: in, bias and out
    shard_bytes = 4 * (4 * 6 // 2 + 6 + 6 * 4 // 2)
    summary = meshed.summary
    lanes = summary["lanes"]
    assert summary["device_bytes"]["params"] == lanes * shard_bytes
    assert summary["device_bytes_without_mesh"]["params"] == lanes * params_bytes
    assert summary["device_bytes"]["opt_state"] > lanes * 2 * shard_bytes  # and a count
    assert summary["bytes_per_device"] == summary["bytes_per_worker"] / 2 > 0
    [note] = re.findall("a device holds .*", meshed.stdout)
    assert "without the mesh" in note


@pytest.mark.slow
def test_an_axis_over_which_nothing_lies_is_said(tmp_path):
    words = f"{TINY} {RULED_TASK} --rule whole --mesh fsdp=2 --steps 1 --eval-every 1"
    ended = run(words, tmp_path / "out")
    assert "no array of the model is sharded over mesh axis fsdp" in ended.stderr


# Checkpoints


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The run with a mesh, stopped after seven steps; not to be changed."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    ended = run(f"{TINY} --mesh fsdp=2", out, signal_before(STOP)).with_code(75)
    return ended


def resumed(source, folder, words, step=7, resume="--resume", run=run):
    """Goes on in a copy of a run's folder, from a step of its checkpoints."""
    out = shutil.copytree(source.out, folder / "resumed")
    for path in (out / "checkpoints").glob("step-*"):
        if int(path.name[5:13]) > step:
            path.unlink()
    ended = run(f"{words} {resume}", out)
    assert f"resuming from the checkpoint of step {step}\n" in ended.stderr
    return ended


@pytest.mark.slow
def test_a_run_with_a_mesh_goes_on_bit_for_bit(meshed, stopped, tmp_path):
    assert_same_end(resumed(stopped, tmp_path, f"{TINY} --mesh fsdp=2"), meshed)


@pytest.mark.parametrize("words", tiers(["--mesh fsdp=3", ""], slow=["--mesh fsdp=3"]))
def test_a_run_goes_on_with_another_mesh_or_none(words, plain, stopped, tmp_path):
    assert_near(resumed(stopped, tmp_path, f"{TINY} {words}"), plain)


# Real processes, with virtual devices of their own


def run_with_devices(command, out, **environ):
    """A command in an environment that says nothing of devices."""
    return execute(command, out, JAX_NUM_CPU_DEVICES=None, PYTHONPATH=OURS, **environ)


@pytest.mark.slow
def test_a_command_has_as_many_virtual_devices_as_its_workers_need(tmp_path):
    words = "--task digits --workers 2 --steps 16 --eval-every 8 --period 4"
    model = tmp_path / "model.safetensors"
    ended = run_with_devices(
        f"{words} --mesh fsdp=2 --export {model}", tmp_path / "meshed"
    )
    assert_near(ended, run(words, tmp_path / "plain"))
    layout = "2 workers of 2 devices (fsdp 2) on 4 cpu devices × 1 lane"
    assert f"{layout}, backend shard_map" in ended.stderr and layout in ended.stdout
    assert params_sha256(load(model)) == ended.summary["params_sha256"]


GPTS = {
    "shakespeare": "--context 8 --width 16 --layers 2 --heads 2",
    "gpt2_synthetic": "--model gpt2-tiny --dtype float32 --positions rotary --remat",
}


@pytest.mark.parametrize("task", tiers(GPTS, slow=["shakespeare"]))
def test_a_gpt_trains_over_both_axes_as_on_a_device(task, tmp_path):
    words = f"--task {task} {GPTS[task]} --workers 2 --steps 2 --eval-every 2"
    words += f" --data-dir {task_folder(task)} --algo diloco --period 2"
    meshed = run_with_devices(f"{words} --mesh fsdp=2,tensor=2", tmp_path / "both")
    assert_near(meshed, run(words, tmp_path / "plain"))
    assert meshed.summary["devices"] == 8 and meshed.summary["mesh"]["tensor"] == 2
    device_bytes, unsharded_bytes = (
        meshed.summary[f"device_bytes{x}"] for x in ("", "_without_mesh")
    )
    for part in ("params", "opt_state", "sync"):
        assert (
            0.25 < device_bytes[part] / unsharded_bytes[part] < 0.5
        )  # vectors, and embeddings by 2


# A worker over two processes

SPANNING = TINY.replace("--workers 2", "--workers 1")
SPAN = f"{SPANNING} --mesh fsdp=2 --processes 2"


@pytest.fixture(scope="module")
def spanned(tmp_path_factory):
    """A run of which no process has the whole model, and its checkpoints."""
    folder = tmp_path_factory.mktemp("spanned")
    ended = run_with_devices(
        f"{SPAN} --export {folder / 'm.safetensors'}", folder / "out"
    )
    return ended.with_code(0)


@pytest.fixture(scope="module")
def one_device_run(tmp_path_factory):
    """The same run by a worker of one device."""
    return run(SPANNING, tmp_path_factory.mktemp("of_one") / "out")


@pytest.mark.slow
def test_a_worker_over_two_processes_trains_as_on_a_device(spanned, one_device_run):
    assert_near(spanned, one_device_run)
    assert spanned.summary["processes"] == spanned.summary["devices"] == 2
    model = load(spanned.out.parent / "m.safetensors")
    assert params_sha256(model) == spanned.summary["params_sha256"]


@pytest.mark.slow
def test_each_process_writes_the_shards_that_it_has(spanned):
    files = sorted((spanned.out / "checkpoints").glob("step-00000011.*.npz"))
    assert [x.name for x in files] == [f"step-00000011.{i}-of-2.npz" for i in (0, 1)]
    read_shards = [shards.read_shard(x) for x in files]
    input_names = []
    sizes = []
    for shard in read_shards:
        names = [name for name in shard.own if "['in']@" in name]
        input_names.append([name for name in names if ".params" in name])
        sizes.append(sum(array.nbytes for array in shard.own.values()))
    name = "[0].params['in']@1,4,6"  # one worker's, cut in two
    assert input_names == [[f"{name}@0:1,0:2,0:6"], [f"{name}@0:1,2:4,0:6"]]
    without = sum(spanned.summary["device_bytes_without_mesh"].values())
    assert sizes[0] == sizes[1] < without * 0.75


@pytest.mark.parametrize(
    "words", tiers([SPAN, SPANNING, f"{SPANNING} --mesh fsdp=3"], slow=[SPAN])
)
def test_it_goes_on_bit_for_bit_and_on_other_meshes(
    words, spanned, one_device_run, tmp_path
):
    ended = resumed(spanned, tmp_path, words, 9, run=run_with_devices)
    if words == SPAN:
        assert_same_end(ended, spanned)
    assert_near(ended, one_device_run)


@pytest.mark.long
def test_others_go_on_over_two_processes_and_start_from_their_center(
    spanned, one_device_run, tmp_path
):
    assert_near(
        resumed(one_device_run, tmp_path / "two", SPAN, 9, run=run_with_devices),
        one_device_run,
    )
    words = f"{TINY} --steps 14"
    resume = "--resume-center"
    assert (
        resumed(spanned, tmp_path / "new", words, 11, resume, run_with_devices).code
        == 0
    )


LOST = {SPAN: "lacks", SPANNING: "a part of"}


@pytest.mark.parametrize("words", tiers(LOST, slow=[SPANNING]))
def test_a_checkpoint_of_which_a_part_is_lost_or_damaged_is_not_used(
    words, spanned, tmp_path
):
    out = shutil.copytree(spanned.out, tmp_path / "out")
    (out / "checkpoints" / "step-00000011.1-of-2.npz").unlink()
    damaged = out / "checkpoints" / "step-00000009.0-of-2.npz"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    ended = run_with_devices(f"{words} --resume", out).with_code(0)
    for step, why in ((11, LOST[words]), (9, "is damaged")):
        message = f"the checkpoint of step {step} cannot be used: .*{why}"
        assert re.search(message, ended.stderr)
    assert "resuming from the checkpoint of step 6" in ended.stderr


@pytest.mark.long
def test_a_killed_process_of_a_worker_is_restarted_to_the_same_end(tmp_path):
    words = f"{SPAN} --steps 400 --eval-every 100 --checkpoint-every 20"
    with commands(tmp_path) as start:
        uninterrupted = start(words, tmp_path / "whole").ended()
        command = start(f"{words} --max-restarts 1")
        in_training(command)
        os.kill(command.member(1), signal.SIGKILL)
        ended = command.ended()
    assert "restart 1 of 1" in ended.stderr
    assert_same_end(ended, uninterrupted)


@pytest.mark.long
@pytest.mark.parametrize("jobs_flag", ["", "--jobs 2"])
def test_variants_of_a_study_may_have_meshes(jobs_flag, tmp_path):
    words = (
        "--task support.tiny_tasks:shared --seeds 2 --workers 2 "
        "--batch-size 8 --steps 4"
    )
    words += f" --algos 'Plain=bmuf, Meshed=bmuf --mesh fsdp=2' {jobs_flag}"
    ended = run_with_devices(words, tmp_path / "out", program=COMPARE).with_code(0)
    loss_by_label = {
        x["label"]: x["test_loss"]
        for x in map(json.loads, (ended.out / "metrics.jsonl").read_text().splitlines())
        if (x["seed"], x["step"]) == (1, 4)
    }
    assert loss_by_label["Meshed"] == pytest.approx(loss_by_label["Plain"], abs=1e-4)
    [config] = ended.out.glob("runs/02-Meshed/*/seed-1/config.json")
    assert json.loads(config.read_text())["mesh"] == {"fsdp": 2}


@pytest.mark.slow
def test_a_job_with_too_few_devices_is_refused(tmp_path):
    words = (
        "--task support.tiny_tasks:shared --algos 'bmuf --mesh fsdp=2' "
        "--devices-per-job 1"
    )
    ended = run_with_devices(words, tmp_path / "out", program=COMPARE)
    assert ended.code == 2 and "need 2 devices, but there are 1" in ended.stderr
