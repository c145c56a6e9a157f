"""The command that compiles runs for machines that are not here."""

import importlib.util
import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import pytest
from support.commands import (
    OTHER_MACHINES,
    ROOT,
    environment,
    find_imports,
    load,
    run_program,
)
from support.faults import until
from support.tiers import tiers

import syncalgos as sa
from experiments.aim import config, tables, times
from experiments.aim.answer import Answer, Findings
from experiments.aim.targets import parse_target
from experiments.command.errors import BadRequest
from experiments.study.variants import Variant
from experiments.training.config import RunConfig
from syncalgos.network import Network

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="jax's CUDA plug-in is not installed",
)
PARAMS = 64 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10  # of digits


def aim(words, timeout=120, **environ):
    """Runs the command as a user does."""
    command = [sys.executable, "-m", "experiments.aim", *shlex.split(words)]
    return run_program(command, timeout=timeout, **OTHER_MACHINES, **environ)


def programs(ended, path):
    assert ended.returncode == 0, ended.stderr
    return {x["label"]: x for x in load(path.read_text())["programs"]}


def across(program, when):
    """(kind, bytes) of what crosses workers."""
    return [
        (row["kind"], row["bytes"])
        for row in program["traffic"]
        if (row["scope"], row["when"]) == ("across workers", when)
    ]


# What is compiled


@pytest.fixture(scope="module")
def aim_run(tmp_path_factory):
    """A command, and what it found: an average, with a page, and sync_sgd."""
    folder = tmp_path_factory.mktemp("aim")
    words = "--target cpu:4 --algos bmuf --period 5 --step-time 0.01 --network 10gbe"
    ended = aim(f"{words} --json {folder}/found.json --page {folder}/page.md")
    return ended, programs(ended, folder / "found.json"), folder / "page.md"


@pytest.mark.slow
def test_programs_send_what_rings_send_of_the_params(aim_run):
    _, by_label, _ = aim_run
    ring = 2 * 3 / 4 * 4 * PARAMS
    assert across(by_label["bmuf"], "sync") == [("all_reduce", ring)]
    assert across(by_label["bmuf"], "step") == []
    assert across(by_label["sync_sgd"], "step") == [("all_reduce", ring)]
    assert across(by_label["sync_sgd"], "sync") == []
    assert all(x["compared"]["is_equal"] for x in by_label.values())


@pytest.mark.slow
def test_sync_sgd_is_added_for_comparison(aim_run):
    ended, by_label, _ = aim_run
    assert (by_label["bmuf"]["is_asked"], by_label["sync_sgd"]["is_asked"]) == (
        True,
        False,
    )
    assert "sync_sgd (for comparison)" in ended.stdout


@pytest.mark.slow
def test_a_device_holds_params_and_two_copies_for_bmuf(aim_run):
    _, by_label, _ = aim_run
    assert by_label["bmuf"]["state"] == {
        "params": 4 * PARAMS,
        "opt_state": 0,
        "sync": 2 * 4 * PARAMS,
    }
    assert by_label["bmuf"]["params"] == PARAMS
    memory = by_label["bmuf"]["memory"]
    assert memory["arguments"] >= 3 * 4 * PARAMS
    # The state is given up for the next one.
    assert memory["aliased"] >= 3 * 4 * PARAMS
    names = [leaf["name"] for leaf in by_label["bmuf"]["largest"]]
    assert len(names) > 3 and any(name.startswith("sync/") for name in names)


@pytest.mark.slow
def test_products_of_a_step_are_those_of_the_mlp(aim_run):
    """Forward, and backward for params and for inputs but those of the first layer."""
    _, by_label, _ = aim_run
    examples = 64 // 4
    forward = sum(2 * examples * n * m for n, m in [(64, 128), (128, 128), (128, 10)])
    inputs = forward - 2 * examples * 64 * 128
    assert by_label["bmuf"]["flops"]["step"] == forward + forward + inputs


@pytest.mark.slow
def test_times_follow_from_recursive_doubling_over_the_link(aim_run):
    """Between four workers, two messages of the whole model are cheaper than a ring."""
    _, by_label, _ = aim_run
    [own_times, link_times] = by_label["bmuf"]["modelled"]
    bandwidth = 1.25e9
    hop = 24e-6
    sync = 2 * (4 * PARAMS / bandwidth + hop)
    assert sync < 2 * 3 / 4 * 4 * PARAMS / bandwidth + 2 * 3 * hop
    assert own_times["sync"] == pytest.approx(sync)
    assert own_times["step"] == pytest.approx(0.01)
    # Metrics are averaged once a dispatch.
    assert own_times["mean"] == pytest.approx(0.01 + sync / 5, rel=2e-2)
    # Below a twentieth of the time: 19 syncs take less than the steps between them.
    assert own_times["period"] == -(-19 * sync // 0.01)
    assert (own_times["network"], link_times["network"]) == ("", "10gbe")
    assert link_times["mean"] == pytest.approx(own_times["mean"])
    sync_sgd_mean = by_label["sync_sgd"]["modelled"][0]["mean"]
    assert own_times["speed_up"] == pytest.approx(sync_sgd_mean / own_times["mean"])
    assert by_label["sync_sgd"]["modelled"][0]["speed_up"] == 1


@pytest.mark.slow
def test_a_dispatch_of_one_step_counts_as_one_though_two_are_compiled(tmp_path):
    path = tmp_path / "found.json"
    words = "--target cpu:2 --algos sync_sgd --step-time 0.01 --dispatch-steps 1"
    [program] = programs(aim(f"{words} --json {path}"), path).values()
    assert program["dispatch_steps"] == 1


@pytest.fixture(scope="module")
def reused(aim_run):
    """Flags, and the file of what a command compiled beside an earlier one's."""
    first_json = aim_run[2].parent / "found.json"
    second_json = first_json.with_name("again.json")
    page = first_json.with_name("again.md")
    words = "--target cpu:4 --algos bmuf,topk_sgd --period 5 --step-time 0.02"
    compiled = programs(
        aim(f"{words} --reuse {first_json} --json {second_json}"), second_json
    )
    # As much goes on without a compiler, from several files, the last one first.
    words += (
        f" --reuse {first_json} --reuse {second_json} --network 10gbe --page {page}"
    )
    assert aim(words, timeout=20).returncode == 0
    return words, compiled, second_json, page


@pytest.mark.slow
def test_programs_of_an_earlier_file_are_not_compiled_again(aim_run, reused):
    _, by_label, _ = aim_run
    _, again, *_ = reused
    assert again["bmuf"]["compile_seconds"] == by_label["bmuf"]["compile_seconds"]
    # Of other figures the model is made anew.
    assert [x["step"] for x in again["bmuf"]["modelled"]] == [pytest.approx(0.02)]
    assert again["topk_sgd"]["traffic"] and not again["topk_sgd"]["compared"]["why"]


@pytest.mark.slow
def test_a_page_of_markdown_has_a_table_of_each_kind(reused):
    words, _, _, page = reused
    lines = page.read_text("utf-8").splitlines()
    assert lines[1] == f"python -m experiments.aim {words}"
    assert [x for x in lines if x.startswith("**")] == [
        "**read off the program**",
        "**modelled, with its own links**",
        "**modelled, with 10gbe between workers**",
    ]
    rows = [x.strip("| ").split(" | ") for x in lines if x.startswith("| bmuf")]
    assert len(rows) == 3
    assert rows[0][-1] == "a sync: 1 all_reduce f32 of 4"
    heads = [x for x in lines if x.startswith("| algorithm")]
    assert [x.count("|") for x in heads] == [len(row) + 1 for row in rows]


@pytest.mark.slow
def test_what_was_found_before_stays_in_its_file(reused, tmp_path):
    """Also what this command does not ask for, or has not come to."""
    out = tmp_path / "found.json"
    out.write_text(reused[2].read_text())
    words = f"--target cpu:4 --algos topk_sgd --reuse {out} --json {out}"
    ended = aim(f"{words} --step-time 0.01", timeout=20)
    assert [*programs(ended, out)] == ["topk_sgd", "sync_sgd", "bmuf"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are not files here")
def test_ctrl_c_ends_the_process_that_compiles_and_keeps_what_was_found(tmp_path):
    out = tmp_path / "found.json"
    words = ["--target", "cpu:2", "--algos", "bmuf,topk_sgd", "--json", str(out)]
    with subprocess.Popen(
        [sys.executable, "-m", "experiments.aim", *words],
        cwd=ROOT,
        env=environment(**OTHER_MACHINES),
        stderr=subprocess.PIPE,
        encoding="utf-8",
    ) as process:
        assert process.stderr is not None
        assert "bmuf" in process.stderr.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until(lambda: out.exists() and children.read_text(), "the second program")
        child = Path(f"/proc/{children.read_text().split()[0]}")
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    until(lambda: not is_running(child), "the end of the process that compiles")
    [first_program, *_] = load(out.read_text())["programs"]
    assert first_program["label"] == "bmuf" and first_program["modelled"] == []


@pytest.mark.slow
def test_a_program_that_takes_too_long_is_given_up(tmp_path):
    ended = aim(f"--target cpu:2 --timeout 0.2 --json {tmp_path}/found.json")
    assert ended.returncode == 1
    assert "given up after 0.2 s (--timeout)" in ended.stdout
    [first_program, _] = json.loads((tmp_path / "found.json").read_text())["programs"]
    assert first_program["timeout"] == 0.2 and "compile_seconds" not in first_program


def is_running(process):
    """Whether there is such a process that has not ended yet."""
    try:
        return process.joinpath("stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_an_algorithm_that_is_refused_does_not_end_the_others(tmp_path):
    """The others' workers lie on all chips of their meshes."""
    out = tmp_path / "found.json"
    words = "--target cpu:8 --mesh fsdp=2 --workers 8"
    ended = aim(f"{words} --algos 'sync_sgd, hierarchical --groups 3' --json {out}")
    assert ended.returncode == 1 and "refused: 8 workers do not" in ended.stdout
    program = {x["label"]: x for x in load(out.read_text())["programs"]}["sync_sgd"]
    assert (program["workers"], program["lanes"], program["mesh"]) == (
        8,
        2,
        {"fsdp": 2},
    )
    assert "memory" in program


# What is refused


@pytest.mark.parametrize(
    ("flag", "name"), [("--json", "notes.txt"), ("--page", "README.md")]
)
def test_files_of_others_are_not_replaced(flag, name, tmp_path):
    path = tmp_path / name
    path.write_text(f"# Notes\n{config.PROGRAM} --target cpu:8\n")
    with pytest.raises(BadRequest) as refused:
        config.read_config(["--target", "cpu:8", flag, str(path)])
    message = f"{flag} {path} exists, and this command did not write it: "
    assert str(refused.value) == f"{message}use another file"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--backend pmap",
            "--backend pmap: only shard_map compiles for absent devices: leave out "
            "--backend",
        ),
        (
            "--mesh fsdp=3",
            "--mesh fsdp=3: workers of 3 chips do not evenly divide the 8 chips of "
            "cpu:8: use sizes whose product does",
        ),
    ],
)
def test_a_refused_flag_is_named_with_what_to_do(words, message):
    with pytest.raises(BadRequest, match=f"^{message}$"):
        config.read_config(["--target", "cpu:8", *words.split()])


@pytest.mark.slow
def test_files_of_this_command_and_empty_ones_are_replaced(aim_run, tmp_path):
    docs = ROOT / "docs"
    empty = tmp_path / "empty.md"
    empty.touch()
    for record, page in (
        (docs / "records" / "wire" / "h100.json", empty),
        (aim_run[2].with_name("found.json"), aim_run[2]),
        (tmp_path / "new.json", empty),
    ):
        words = ["--target", "cpu:8", "--json", str(record), "--page", str(page)]
        assert config.read_config(words).json == record


def test_flags_are_checked_without_jax():
    words = ["--target", "cpu:8", "--algos", "all", "--mesh", "fsdp=2"]
    read = f"from experiments.aim import config, jobs; config.read_config({words})"
    assert "jax" not in find_imports(read)


# The model of time


RECORD = {
    **{"flops": {"step": 4e12, "sync": 0.0}, "dispatch_steps": 8, "steps": 8},
    **{"mesh": {}, "workers": 2, "lanes": 1, "delay": 0, "traffic": [], "sends": None},
    "ledger": {"always": {}, "branched": {}},
}


def modelled(rows, period=None, network=None, seconds=1.0, arguments=None, **fields):
    """The times of a program's findings, of 8 steps, by an algorithm's period."""
    findings = Findings.from_json({**RECORD, "traffic": rows, **fields})
    run = RunConfig(
        arguments=({"period": period} if period else {}) | (arguments or {})
    )
    job = config.CompileJob(TPU, Variant("bmuf", "bmuf", run), (), run)
    model_times = times.model_times(findings, job, network, seconds)
    assert model_times is not None
    return model_times


def row(when="sync", network="inside", size=1e9, **fields):
    counts = {"kind": "all_reduce", "calls": 1, "group": 2, "bytes": size}
    fixed = {"scope": "across workers", "overlapped": 0, "rings": 1}
    return {"when": when, "network": network, **counts, **fixed, **fields}


LINKS = {"inside": Network("a", 1e9, 0.0), "between": Network("b", 1e8, 0.0)}
TPU = parse_target("tpu:v5e:2x4")
TPU = TPU._replace(chip=TPU.chip._replace(**LINKS))


def fragments(steps):
    """Sends of a run in two fragments: a quarter of all, and the rest."""
    kinds = [{}, {"all_reduce": [1e9, 1]}, {"all_reduce": [3e9, 1]}]
    ledger = {"always": {}, "branched": {"all_reduce": [4e9, 2]}}
    return {"ledger": ledger, "sends": {"kinds": kinds, "steps": steps}}


EACH_ROUND = "0*3 2*1 0*3 2*1"
ONCE_EACH = "0*3 1*1 0*3 2*1"


def test_chips_of_a_worker_share_a_given_link_and_rings_have_their_own():
    rows = [row("step", "between", size=1e8, rings=4)]
    mesh = {"a": 2, "b": 4}
    model_times = modelled(rows, network=Network("given", 1e9, 0.0), mesh=mesh)
    assert model_times.every == pytest.approx(8 * 1e8 / 1e9)
    assert modelled(rows, mesh=mesh).every == pytest.approx(1e8 / 4 / 1e8)


def test_a_ring_through_all_chips_passes_a_given_link_once_a_worker():
    rows = [row("step", size=1e6, group=16)]
    link = Network("given", 1e9, 0.5, rings_only=True)
    model_times = modelled(rows, network=link, mesh={"a": 8})
    assert model_times.every == pytest.approx(2 * 1 * 0.5 + 1e-3)
    assert model_times.all_reduce == "ring"


def test_a_small_all_reduce_takes_recursive_doubling_except_on_a_torus():
    small = [row("step", "between", size=1e3, group=8)]
    link = Network("given", 1e9, 0.5)
    model_times = modelled(small, network=link, workers=8)
    assert model_times.every == pytest.approx(3 * 0.5, rel=1e-4)
    assert model_times.all_reduce == "recursive doubling"
    chip = parse_target("tpu:v5e:2x4").chip
    assert chip.inside.rings_only and not chip.between.rings_only


class PeriodCase(NamedTuple):
    """The syncs of a job, and the least period of an algorithm that sends so.

    A step takes a second, and a sync of all fragments 3 s: a twentieth of 57 steps.
    """

    steps: str
    delay: int = 0
    dispatched: float = 0
    period: int | None = None


@pytest.mark.parametrize(
    PeriodCase._fields,
    [
        PeriodCase(steps=EACH_ROUND, period=57),
        # Only the first phase sends in every step.
        PeriodCase(steps="2*4 0*3 2*1", period=57),
        # Two of 1 s each round.
        PeriodCase(steps="0*1 1*1 0*1 1*1 0*1 1*1 0*1 1*1", period=38),
        # What every step sends is too much already.
        PeriodCase(steps="1*3 2*1 1*3 2*1"),
        PeriodCase(steps="0*8"),
        # Rounds differ: the later half counts.
        PeriodCase(steps="1*1 0*3 2*1 0*3", period=57),
        # A delay hides what is sent meanwhile; one of the whole period grows with it.
        PeriodCase(steps=EACH_ROUND, delay=1, period=38),
        PeriodCase(steps=EACH_ROUND, delay=2, period=19),
        PeriodCase(steps=EACH_ROUND, delay=3, period=1),
        PeriodCase(steps=EACH_ROUND, delay=4, period=3),
        # What a dispatch sends stays, in seconds a step, however long the period.
        # A third of the nineteenth of a step.
        PeriodCase(steps=EACH_ROUND, dispatched=1 / 57, period=86),
        PeriodCase(steps=EACH_ROUND, dispatched=1 / 10),
        # 3 s in 60/57 s a step, less what is waited for.
        PeriodCase(steps=EACH_ROUND, delay=4, dispatched=1 / 57, period=3),
        PeriodCase(steps=EACH_ROUND, delay=4, dispatched=1 / 10),
    ],
)
def test_the_least_period(steps, delay, dispatched, period):
    rows = [row(size=4e9), row("dispatch", size=8 * dispatched * 1e9)]
    assert modelled(rows, 4, delay=delay, **fragments(steps)).period == period


@pytest.mark.parametrize(
    ("arguments", "steps", "period"),
    [
        ({"inner_period": 2}, "0*1 1*1 0*1 2*1 0*1 1*1 0*1 2*1", None),
        ({"inner_period": None}, "0*1 1*1 0*1 2*1 0*1 1*1 0*1 2*1", 76),  # 4 s
        ({"reset_period": 2}, EACH_ROUND, 57),
    ],
)
def test_syncs_of_another_period_have_no_least_period(arguments, steps, period):
    assert (
        modelled([row(size=4e9)], 4, arguments=arguments, **fragments(steps)).period
        == period
    )


def test_a_period_of_one_is_no_constant_cost():
    assert modelled([row(size=4e9)], 1, **fragments("2*8")).period == 57


def test_a_plan_of_the_library_agrees():
    """For the same bytes: a ring of two workers sends a model of a gigabyte once."""
    link = Network("a link", 1e9, 0.25)
    model = jax.ShapeDtypeStruct((2**28,), "f")
    once = {"all_reduce": [4.0 * 2**28, 1]}
    sends = {"kinds": [{}, once], "steps": "0*3 1*1 0*3 1*1"}
    run = {"ledger": {"always": {}, "branched": once}, "sends": sends}
    model_times = modelled([row(size=4.0 * 2**28)], 4, link, **run)
    options = {"step_seconds": 1.0, "network": link, "steps": 8}
    planned = sa.plan(sa.diloco(4), model, workers=2, **options)
    assert model_times.sync == pytest.approx(planned.seconds)
    assert model_times.share == pytest.approx(planned.share)
    assert model_times.period == planned.enough


def test_a_speed_up_is_over_the_same_work():
    own_flags = (
        "--batch-size 8",
        "--image-size 32",
        "--optimizer adam",
        "--accumulate 2",
    )
    algos = ",".join(["sync_sgd", "bmuf", *(f"bmuf {x}" for x in own_flags)])
    words = ["--target=cpu:4", "--step-time=1", "--task=imagenet_synthetic"]
    aim_config = config.read_config([*words, f"--algos={algos}"])
    answers = [
        Answer.from_json(RECORD | {"batch_size": job.config.batch_size})
        for job in aim_config.jobs
    ]
    speed_ups = [x.times[0].speed_up for x in tables.make_results(aim_config, answers)]
    assert speed_ups == [1, 1, None, None, None, None]


def test_compute_is_the_share_of_peak():
    model_times = modelled([], seconds=None)
    assert model_times.compute == 4e12 / (config.MFU * 197e12)
    assert (
        model_times.mean
        == pytest.approx(model_times.step)
        == pytest.approx(model_times.compute)
    )
    assert model_times.share == pytest.approx(0) and model_times.sync == 0


def test_a_step_sends_its_part_of_the_branches():
    model_times = modelled([row(size=4e9)], **fragments(ONCE_EACH))
    assert model_times.sync == pytest.approx(3)  # of 4 seconds at 1 GB/s
    assert model_times.mean == pytest.approx(1 + 4 / 8)


@pytest.mark.parametrize(
    ("traffic_row", "seconds"),
    [
        (row("step", size=5e8), 1.5),
        (row("step", "between", size=5e7), 1.5),
        (row("step", "between", size=1e8, rings=2), 1.5),
        (row("step", size=5e8, overlapped=1), 1.0),  # within the second of compute
        (row("step", size=3e9, overlapped=1), 3.0),
        (row("step", size=5e8, scope="inside a worker"), 1.5),
        (row("dispatch", size=8e8), 1.1),
    ],
)
def test_a_step_waits_for_what_nothing_hides(traffic_row, seconds):
    assert modelled([traffic_row]).mean == pytest.approx(seconds)


def test_a_delay_hides_a_sync_behind_the_steps_after_it():
    model_times = modelled([row(size=4e9)], delay=3, **fragments(ONCE_EACH))
    # The first second arrives in time; of the last three the run waits for all.
    assert model_times.mean == pytest.approx(1)


# The ledger beside the compiler


def compare(rows, counted, **fields):
    """Compares a program's rows with the ledger's counts."""
    ledger = {"always": {}, "branched": counted}
    facts = {"lanes": 1, "workers": 4, "slices": 1, "mesh": {}}
    findings = Findings.from_json(
        {**facts, "traffic": rows, "ledger": ledger, **fields}
    )
    return tables.compare_ledger(findings)


def test_equal_bytes_of_a_kind_are_equal_however_many_calls_there_are():
    rows = [row(size=40.0), row("step", size=60.0), row("dispatch", size=7.0)]
    comparison = compare(rows, {"all_reduce": [100.0, 5]})
    assert comparison is not None and comparison.is_equal and comparison.why == ()
    [beside] = comparison.rows
    assert (beside.calls, beside.collectives) == (5, 2)


class DifferenceCase(NamedTuple):
    """Rows of a program, beside counts, that differ for these reasons."""

    rows: list[dict]
    counted: Mapping[str, list[float]] = MappingProxyType({})
    fields: Mapping[str, Any] = MappingProxyType({})
    why: tuple[str, ...] = ()


@pytest.mark.parametrize(
    DifferenceCase._fields,
    [
        DifferenceCase(rows=[row(size=8.0, promoted=1)], why=("wider",)),
        DifferenceCase(
            rows=[row(size=8.0)],
            fields={"lanes": 2},
            why=("several workers",),
        ),
        DifferenceCase(
            rows=[row(size=4.0, kind="permute")],
            why=("other collectives",),
        ),
        DifferenceCase(
            rows=[row(size=8.0, network="between")],
            fields={"slices": 2},
            why=("between slices",),
        ),
        DifferenceCase(
            rows=[row(size=3.0)],
            fields={"mesh": {"fsdp": 2}},
            why=("sends less",),
        ),
        DifferenceCase(
            rows=[row(size=8.0, group=32)],
            why=("across workers at once",),
        ),
        DifferenceCase(
            rows=[row(size=64.0), row(size=970.0, kind="all_gather")],
            counted={"all_gather": [1000.0, 4]},
            why=("small all-gathers (30 B) into all-reduces (60 B)",),
        ),
        # Padding is not taken for gathers by sums.
        DifferenceCase(
            rows=[row(size=9060.0), row(size=970.0, kind="all_gather")],
            counted={"all_gather": [1000.0, 4]},
        ),
        DifferenceCase(rows=[row(size=8.0)]),
    ],
)
def test_a_difference_has_its_name_or_none(rows, counted, fields, why):
    comparison = compare(rows, {"all_reduce": [4.0, 1], **counted}, **fields)
    assert comparison is not None and not comparison.is_equal
    assert len(comparison.why) == len(why)
    assert all(text in reason for text, reason in zip(why, comparison.why, strict=True))


def test_memory_that_is_missing_is_told_from_other_refusals():
    refused = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM"
    assert Findings.from_json({"refused": refused}).is_too_large
    assert not Findings.from_json({"refused": "INTERNAL: a bug"}).is_too_large


# TPUs


@pytest.mark.slow
@needs_libtpu
def test_a_gpt_is_compiled_for_a_tpu_that_is_not_here(tmp_path):
    out = tmp_path / "found.json"
    words = "--target tpu:v5e:4x4 --task shakespeare --width 256 --mesh fsdp=4"
    ended = aim(f"{words} --algos diloco --json {out}", timeout=300)
    program = programs(ended, out)["diloco"]
    assert (program["workers"], program["fits"]) == (4, True)
    assert program["compared"]["is_equal"]
    # Matrices are cut in four. Vectors are not: of a layer two norms, and the biases
    # of attention and of the MLP; and the last norm.
    vectors = 4 * (2 * 2 * 256 + 256 + 4 * 256 + 256) + 2 * 256
    shard = (program["params"] - vectors) // 4 + vectors
    assert across(program, "sync") == [("all_reduce", 2 * 3 / 4 * 4 * shard)]
    # What libtpu says without a TPU stays with the process that compiles.
    assert ended.stderr.count("\n") == 2
    assert 0 < program["chip_bytes"] < program["target"]["chip"]["memory"] == 16 * 2**30


@pytest.mark.slow
@needs_libtpu
def test_what_does_not_fit_names_its_largest_leaves(tmp_path):
    words = "--target tpu:v5e:2x2 --task shakespeare --width 4096 --layers 16"
    ended = aim(f"{words} --algos bmuf", timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "does not fit" in ended.stderr
    assert "largest leaves on a chip: params/blocks/" in ended.stdout


# The docs

EXAMPLES, OF_GPT2 = (
    re.findall(
        r"^python -m experiments\.aim (.*)$",
        (ROOT / "docs" / page).read_text().replace("\\\n", " "),
        re.MULTILINE,
    )
    for page in ("aim.md", "gpt2.md")
)


@pytest.mark.parametrize("words", EXAMPLES + OF_GPT2)
def test_flags_of_the_examples_are_fine(words):
    assert config.read_config(shlex.split(words)).jobs


def example(words):
    marks = [pytest.mark.slow if words.startswith("--target cpu") else pytest.mark.long]
    marks += [needs_libtpu] if "tpu:" in words else []
    marks += [needs_cuda] if "cuda:" in words else []
    return pytest.param(words, marks=marks)


@pytest.mark.parametrize("words", [example(words) for words in EXAMPLES])
def test_an_example_runs_as_written(words, tmp_path):
    ended = aim(words.replace("found.", f"{tmp_path}/found."), timeout=3000)
    assert ended.returncode == 0, ended.stderr
    assert "explained" in ended.stdout or "equal" in ended.stdout
    assert "differs" not in ended.stdout


RECORDS = sorted(path.stem for path in (ROOT / "docs" / "records" / "wire").glob("*"))


@pytest.mark.parametrize("name", tiers(RECORDS, ["v5p"]))
def test_records_of_the_docs_give_their_own_figures_and_tables(name, tmp_path):
    record = ROOT / "docs" / "records" / "wire" / f"{name}.json"
    contents = load(record.read_text())
    words = contents["command"][3:]  # after python -m experiments.aim
    assert words[-2:] == ["--json", f"docs/records/wire/{record.name}"]
    new_record = tmp_path / record.name
    page = tmp_path / "page.md"
    words[-1:] = [str(new_record), "--page", str(page)]
    # A later algorithm is not in them, and there may be no compiler.
    labels = [program["label"] for program in contents["programs"]]
    if "all" in words:
        words[words.index("all")] = ",".join(labels)
    ended = aim(shlex.join(words), timeout=60)
    assert ended.returncode == 0, ended.stderr
    programs = load(new_record.read_text())["programs"]
    for program, recorded in zip(programs, contents["programs"], strict=True):
        for key in ("label", "chip_bytes", "memory", "traffic", "ledger", "sends"):
            assert program[key] == recorded[key]
    text = page.read_text("utf-8")
    assert all(f"\n| {label} " in text for label in labels)


def test_a_shared_flag_need_not_be_one_of_the_baseline_that_is_added():
    aim_config = config.read_config(
        ["--target", "cpu:4", "--algos", "bmuf,diloco", "--period", "5"]
    )
    labels = [job.variant.label for job in aim_config.jobs]
    assert labels == ["bmuf", "diloco", "sync_sgd"]
    are_asked = [job.variant in aim_config.variants for job in aim_config.jobs]
    assert are_asked == [True, True, False]


@pytest.mark.parametrize("name", ["h100", "v5e", "v5e-slices", "v5p"])
def test_an_answer_is_written_as_it_was_read(name):
    record = ROOT / "docs" / "records" / "wire" / f"{name}.json"
    for program in load(record.read_text())["programs"]:
        content = Answer.from_json(program).to_json()
        assert list(content) == [key for key in program if key in content]
        # Flops, leaves and memory had more keys.
        for name in ("traffic", "sends", "state", "ledger", "compile_seconds"):
            assert content[name] == program[name]


@pytest.mark.parametrize(
    "content", [{"error": "no"}, {"failed": "signal 9"}, {"timeout": 0.5}]
)
def test_an_answer_without_findings_says_why(content):
    assert Answer.from_json(content).to_json() == content


def test_a_batch_may_be_smaller_than_the_default_number_of_workers():
    words = ["--target", "cpu:2,cpu:4", "--algos", "bmuf", "--batch-size", "4"]
    jobs = config.read_config(words).jobs
    assert [job.config.workers for job in jobs] == [2, 2, 4, 4]
    with pytest.raises(BadRequest, match=r"4.*8"):
        config.read_config([*words, "--target", "cpu:8"])
