"""Studies by jobs: a plan of their runs, a real scheduler, real workers, and faults."""

import asyncio
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import COMPARE, ROOT, TIMEOUT, beneath, execute, run_python
from support.dask_cluster import certificates, cluster
from support.faults import Command, tagged, until
from support.resumed_runs import OURS
from support.stored_runs import write_run
from support.study_commands import but_for_times, runs_done, table
from support.tiers import tiers

from experiments.api import compare
from experiments.run import main as run_main
from experiments.study.jobs import Unreachable, reach
from experiments.study.jobs import cluster as of_command
from experiments.study.making import FinishedRun, Refused, StudyQueue
from experiments.study.runs import RunSet
from experiments.study.variants import Variant
from experiments.training.config import RunConfig

# Two variants, each at two rates on held-out data, then three seeds at the best.
FLAGS = "--period 5 --seeds 3 --steps 20 --eval-every 10 --step-time 0.001"
STUDY = (
    f"--algos 'sync_sgd, NBM=bmuf --nesterov' --task support.tiny_tasks:drawing {FLAGS}"
)
STUDY += " --tune lr=0.02,0.1"
ENVIRONMENT = {"PYTHONPATH": OURS}


def hashes(out):
    """The params of every run, by its folder in the study."""
    runs = runs_done(out)
    pairs = zip(runs, summaries(runs), strict=True)
    return {str(run.relative_to(out)): s["params_sha256"] for run, s in pairs}


def study(words, out, **environ):
    """Makes a study by a command without a scheduler."""
    return execute(words, out, COMPARE, 5 * TIMEOUT, **ENVIRONMENT, **environ)


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """The study as one process makes it."""
    out = tmp_path_factory.mktemp("serial") / "study"
    study(STUDY, out, JAX_NUM_CPU_DEVICES=1).with_code(0)
    assert len(hashes(out)) == 10
    return out


def summaries(runs):
    """The summaries of runs."""
    return [json.loads((run / "summary.json").read_text()) for run in runs]


def check_same(out, serial):
    """Compares all that two studies of one command share."""
    assert hashes(out) == hashes(serial)
    assert but_for_times(out) == but_for_times(serial)
    assert [x for x in out.rglob(".s*")] == []


@pytest.mark.long
@pytest.mark.parametrize(("number", "label"), [(1, "sync_sgd"), (2, "NBM")])
def test_the_rate_chosen_is_that_of_the_best_validation_figure(serial, number, label):
    trial_summaries = summaries(serial.glob(f"tuning/0{number}-*/runs/*/seed-1000"))
    assert sorted(x["lr"] for x in trial_summaries) == [0.02, 0.1]
    assert {x["validation"] for x in trial_summaries} == {0.1}
    best = max(trial_summaries, key=lambda x: (x["test_accuracy"], -x["test_loss"]))[
        "lr"
    ]
    line = table(serial)[label]
    assert float(line["tuned_lr"]) == float(line["lr"]) == best
    assert f" --lr {best:g} " in line["command"]
    run_summaries = summaries(serial.glob(f"runs/0{number}-*/runs/*/seed-*"))
    assert [(x["lr"], x["validation"]) for x in run_summaries] == [(best, None)] * 3


@pytest.mark.slow
def test_finals_have_a_line_for_each_run_as_its_summary_says(serial):
    lines = (serial / "finals.jsonl").read_text().splitlines()
    finals = [json.loads(line) for line in lines]
    runs = runs_done(serial)
    for key in ("seed", "lr", "test_loss", "test_accuracy", "diverged"):
        expected = sorted(summary[key] for summary in summaries(runs))
        assert sorted(line[key] for line in finals) == expected
    assert [not line["reported"] for line in finals].count(True) == 4
    # What all runs share is there once.
    assert ["versions" in line for line in finals] == [True] + [False] * 9
    assert ["devices" in line for line in finals] == [True] + [False] * 9


# The plan.


def make_run_sets(folder, variants=2, seeds=3, trials=2):
    """Run sets with trials, in an empty folder."""

    def run_set(number, **changes):
        variant = Variant(f"v{number}", RunConfig(algo="sync_sgd"))
        plain = RunSet(variant, number, "", RunConfig(), folder, range(seeds))
        return plain._replace(**changes)

    def trial(number, value):
        trial_config = RunConfig(validation=0.1)
        seeds = range(1000, 1001)
        return run_set(number, common=trial_config, seeds=seeds, values={"lr": value})

    values = [str(i / 10) for i in range(1, trials + 1)]
    run_sets = []
    for number in range(variants):
        variant_trials = [trial(number, value) for value in values]
        run_sets.append(run_set(number, trials=variant_trials))
    return run_sets


def make_queue(sets):
    return StudyQueue(sets, lambda run_set: run_set._replace(values={"lr": "0.1"}))


@given(
    variants=st.integers(1, 4),
    seeds=st.integers(1, 5),
    trials=st.integers(0, 3),
    order=st.randoms(use_true_random=False),
    jobs=st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_each_run_is_handed_out_once_and_finals_after_their_own_trials(
    variants, seeds, trials, order, jobs, tmp_path_factory
):
    queue = make_queue(
        make_run_sets(tmp_path_factory.mktemp("plan"), variants, seeds, trials)
    )
    busy = []
    ended_runs = []
    lost = 0
    last_variant = None
    while not queue.is_over:
        while len(busy) < jobs:
            run = queue.take(last_variant)
            if not run:
                break
            busy.append(run)
        run = busy.pop(order.randrange(len(busy)))
        last_variant = order.choice([None, run.number])
        if lost < 3 and order.random() < 0.2:
            lost += 1
            queue.give_back(run)
            continue
        if not run.runs.is_trial:
            assert sum(x.startswith(f"{run.runs.name} ") for x in ended_runs) == trials
        ended_runs.append(run.name)
        queue.count(run, FinishedRun(""))
    assert len({*ended_runs}) == len(ended_runs) == queue.total == queue.num_done
    assert queue.total == variants * (trials + seeds)


def test_a_job_stays_with_its_variant_or_begins_one_that_no_other_job_has(tmp_path):
    queue = make_queue(make_run_sets(tmp_path, variants=3, seeds=1, trials=2))
    first_run = queue.take()
    second_run = queue.take()
    assert first_run and second_run and (first_run.number, second_run.number) == (0, 1)
    queue.count(second_run, FinishedRun(""))
    third_run = queue.take(second_run.number)
    assert third_run and third_run.number == second_run.number
    queue.count(first_run, FinishedRun(""))
    later_runs = [queue.take(1) for _ in range(3)]
    assert [run.number for run in later_runs if run] == [0, 2, 2]


def test_runs_that_are_there_are_not_planned(tmp_path):
    sets = make_run_sets(tmp_path, variants=1, seeds=3, trials=0)
    sets[0].seed_folder(0).mkdir(parents=True)
    for seed, stopped in ((1, False), (2, True)):
        write_run(sets[0].seed_folder(seed), "bmuf", (0.1, 0.2, 0.3), stopped=stopped)
    queue = StudyQueue(sets, lambda run_set: run_set)
    assert [run.seed for run in queue.waiting] == [0, 2]
    assert (queue.num_done, queue.total) == (1, 3)


def test_failed_trials_leave_their_variant_without_runs_alone(tmp_path):
    sets = make_run_sets(tmp_path, variants=2, seeds=2, trials=1)
    queue = StudyQueue(sets, lambda run_set: None if run_set.number == 0 else run_set)
    run = queue.take()
    while run:
        is_bad = run.name.startswith("v0")
        queue.count(run, Refused("bad") if is_bad else FinishedRun(""))
        run = queue.take()
    assert [x is None for x in queue.reported] == [True, False]
    assert [x.line for _, x in queue.failures][-1].startswith(
        "all of its trials failed"
    )


# Command lines, in this process.


def test_without_dask_a_study_is_serial_and_jobs_say_what_to_install(
    run_study, monkeypatch
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: find(name) if name != "distributed" else None,
    )
    code, _, stderr = run_study("--jobs 2")
    assert code == 2 and "pip install -e '.[cluster]'" in stderr


SHORT = "--algos sync_sgd --workers 2 --steps 8 --eval-every 4 --step-time 0.001"
SHORT += " --network dsl"


@pytest.mark.slow
def test_listed_commands_make_the_study(run_study, tmp_path):
    words = f"{SHORT} --task support.tiny_tasks:drawing --seeds 1 --tune lr=0.02,0.1"
    for num_listed, note in ((2, "more depend on these trials"), (1, "")):
        code, stdout, stderr = run_study(f"{words} --list")
        assert code == 0 and f"{num_listed} of 3 runs are listed" in stderr
        assert note in stderr
        for line in stdout.splitlines():
            _, _, flags = line.partition(" -m experiments.run ")
            assert run_main(shlex.split(flags)) == 0
    code, stdout, stderr = run_study(f"{words} --list")
    assert (code, stdout.strip()) == (0, "") and "all 3 runs are complete" in stderr
    run_hashes = hashes(tmp_path / "study")
    shutil.rmtree(tmp_path / "study" / "runs")
    code, _, stderr = run_study(words)
    assert code == 0 and stderr.startswith("2 of 3 runs are already complete")
    assert hashes(tmp_path / "study") == run_hashes


@pytest.mark.slow
def test_a_failed_run_is_named_and_the_others_go_on(run_study, tmp_path):
    code, stdout, stderr = run_study(
        f"{SHORT} --task support.tiny_tasks:unlucky --seeds 3"
    )
    assert code == 1
    assert {x.name for x in runs_done(tmp_path / "study")} == {"seed-0", "seed-2"}
    assert re.search("failed: sync_sgd, seed 1: .*no luck", stderr)
    assert "1 of 3 runs failed" in stderr
    assert "1 of 3 runs failed and is missing" in stdout
    assert (tmp_path / "study" / "report.html").exists()


def test_a_scheduler_that_is_not_there_is_said_and_leaves_nothing(
    run_study, tmp_path, monkeypatch
):
    monkeypatch.setattr("experiments.study.study.ANSWER", 1.0)
    code, _, stderr = run_study("--algos sync_sgd --scheduler tcp://127.0.0.1:1")
    assert code == 4 and ": no answer: " in stderr
    assert not (tmp_path / "study").exists()


def test_a_scheduler_is_looked_for_in_a_running_event_loop():
    """A notebook runs one."""

    async def cell():
        reach("tcp://127.0.0.1:1", 0.2)

    with pytest.raises(Unreachable, match=": no answer: "):
        asyncio.run(cell())


# Jobs here.


@pytest.mark.long
def test_jobs_with_devices_of_their_own_make_the_same_tuned_study(serial, tmp_path):
    words = f"{STUDY} --jobs 2 --devices-per-job 1"
    study(words, tmp_path / "study", JAX_NUM_CPU_DEVICES=2).with_code(0)
    assert hashes(tmp_path / "study") == hashes(serial)


@pytest.mark.slow
def test_a_script_needs_no_guard_of_its_main_module(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from experiments import compare\n"
        "flags = {'task': 'digits', 'workers': 2, 'steps': 8, 'jobs': 2}\n"
        "print(len(compare('sync_sgd, bmuf', seeds=1, flags=flags).runs))\n"
    )
    stdout, _ = run_python([script], tmp_path, 5 * TIMEOUT)
    assert stdout == "2\n"


ENDS = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGKILL: -9}


@pytest.mark.parametrize("number", tiers(ENDS, slow=[signal.SIGINT]))
def test_a_stopped_command_leaves_no_process_and_goes_on(serial, number, tmp_path):
    out = tmp_path / "study"
    tag = uuid.uuid4().hex
    code = ENDS[number]
    command = Command(f"{STUDY} --jobs 2", out, tag, 0, 1, {}, COMPARE)
    command.wait_for(r"run 2/10 ")
    command.kill(number)
    assert command.ended().code == code
    until(lambda: not tagged(tag), "no process is left")
    if code != -9:
        assert re.search(r"stopped after \d+ of 10 runs", command.stderr_text)
        assert list(out.rglob(".s*")) == []
    ended = study(f"{STUDY} --jobs 2", out, JAX_NUM_CPU_DEVICES=1).with_code(0)
    assert re.match(r"[2-9] of 10 runs are already complete", ended.stderr)
    check_same(out, serial)


@pytest.mark.long
def test_a_run_that_kills_its_worker_is_given_up(tmp_path):
    words = (
        f"--algos sync_sgd,bmuf --task support.tiny_tasks:unlucky --ends kill {FLAGS}"
    )
    ended = study(f"{words} --jobs 2", tmp_path / "study")
    assert ended.code == 1
    assert {run.name for run in runs_done(tmp_path / "study")} == {"seed-0", "seed-2"}
    for label in ("sync_sgd", "bmuf"):
        assert ended.stderr.count(f"{label}, seed 1: the Dask worker") == 2
        assert f"failed: {label}, seed 1: given up after 3 times" in ended.stderr
    assert "2 of 6 runs failed" in ended.stderr


LONG_RUNS = (
    "--algos sync_sgd --task support.tiny_tasks:drawing --seeds 2 --steps 1000000"
)
LONG_RUNS += " --eval-every 100000 --jobs 2"


def executing(command: Command, folders: int = 2) -> list[psutil.Process]:
    """Waits until runs have begun; returns the processes of a command's own workers.

    Args:
        command: the command.
        folders: how many runs have begun, those that were lost included.
    """
    begun = lambda: len(beneath(command.run_out, ".seed-*")) == folders  # noqa: E731
    until(begun, f"{folders} runs have begun")
    workers = psutil.Process(command.process.pid).children()
    assert len(workers) == 2
    return workers


@pytest.fixture
def long_study(tmp_path):
    """Starts a study by jobs whose runs do not end; ends all its processes."""
    tag = uuid.uuid4().hex
    commands = []

    def start(program=COMPARE, **environ):
        out = tmp_path / "study"
        commands.append(Command(LONG_RUNS, out, tag, 0, 1, environ, program))
        return commands[-1]

    yield start
    for pid in tagged(tag):  # it may be stopped
        os.kill(pid, signal.SIGKILL)
    for command in commands:
        command.process.wait(TIMEOUT)


WORKER_IS_GONE = r"the Dask worker tcp://\S+ is gone; the run starts again"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_of_a_command_that_are_all_ended_are_replaced(serial, number, tmp_path):
    out = tmp_path / "study"
    tag = uuid.uuid4().hex
    command = Command(f"{STUDY} --jobs 2", out, tag, 0, 1, {}, COMPARE)
    command.wait_for(r"run 1/10 ")
    for worker in psutil.Process(command.process.pid).children():
        worker.send_signal(number)
    ended = command.ended(5 * TIMEOUT).with_code(0)
    assert len(re.findall(OTHER, ended.stderr)) == 2
    check_same(out, serial)


OTHER = r"a Dask worker of --jobs (was|ended) .*: another one starts"


@pytest.mark.slow
def test_a_command_whose_workers_are_all_killed_before_a_run_ends(long_study):
    command = long_study()
    children = psutil.Process(command.process.pid).children
    until(lambda: len(children()) == 2, "both start")
    for worker in children():
        worker.kill()
    ended = command.ended()
    assert ended.code == 75
    assert ended.stderr.splitlines()[-2:] == [
        "a Dask worker of --jobs was killed by SIGKILL before its first run: the "
        "study goes on with 1",
        "error: no Dask worker of --jobs is left: the last was killed by SIGKILL "
        "before its first run: completed runs are kept; the same command continues "
        "from them, and fewer --jobs take less memory",
    ]


@pytest.mark.slow
def test_workers_that_cannot_start_are_no_passing_error(long_study, tmp_path):
    """The command itself has the Dask that is installed."""
    folder = tmp_path / "broken"
    (folder / "distributed").mkdir(parents=True)
    (folder / "distributed" / "__init__.py").write_text("raise ImportError\n")
    program = [sys.executable, "-c"]
    program += [
        "import sys; import distributed; from experiments.study.main import main\n"
        f"sys.path.insert(0, {str(folder)!r})\n"
        "sys.exit(main(sys.argv[1:]))"
    ]
    ended = long_study(program).ended()
    assert ended.code == 2
    assert re.search(
        "no Dask worker of --jobs is left: the last ended with code [12] before its "
        "first run: run python -m dask worker .* to see why, or leave out --jobs",
        ended.stderr.splitlines()[-1],
    )


@pytest.mark.slow
def test_a_stopped_worker_of_a_command_is_replaced_soon(long_study):
    command = long_study()
    workers = executing(command)
    workers[0].suspend()
    stop_time = time.monotonic()
    command.wait_for(f"was stopped for 10 s: another one starts(.|\n)*{WORKER_IS_GONE}")
    assert time.monotonic() - stop_time < 20
    assert not workers[0].is_running()
    assert workers[1] in executing(command, folders=3)
    command.kill(signal.SIGTERM)
    assert command.ended().code == 75


@pytest.mark.slow
def test_a_command_that_was_stopped_itself_keeps_its_workers(long_study):
    command = long_study()
    workers = executing(command)
    command.kill(signal.SIGSTOP)
    time.sleep(12)
    command.kill(signal.SIGCONT)
    time.sleep(2)
    assert psutil.Process(command.process.pid).children() == workers
    assert "is gone" not in command.stderr_text


@pytest.mark.slow
def test_the_cluster_of_a_command_listens_here_alone():
    this = psutil.Process()

    def listening():
        processes = [this, *this.children(recursive=True)]
        connections = []
        for process in processes:
            connections += process.net_connections(kind="inet")
        return {x.laddr for x in connections if x.status == psutil.CONN_LISTEN}

    old_addresses = listening()
    with of_command(None, 1) as dask:
        dask.client.wait_for_workers(1, TIMEOUT)
        addresses = listening() - old_addresses
        assert len(addresses) > 2  # the scheduler, its pages, and the worker
        assert {address.ip for address in addresses} == {"127.0.0.1"}


# Jobs on a cluster.


@pytest.mark.slow
@pytest.mark.parametrize("place", ["scheduler", "jobs"])
def test_a_study_by_workers_is_made_in_a_running_event_loop(place, tmp_path):
    flags = {"task": "digits", "workers": 2, "steps": 8, "out": tmp_path / "study"}
    with cluster(tmp_path, workers=1) as other:
        value = other.address if place == "scheduler" else 2

        async def cell():
            return compare("sync_sgd", seeds=1, flags=flags | {place: value})

        study = asyncio.run(cell())
    assert len(study.runs) == 1 and runs_done(tmp_path / "study")


@pytest.mark.slow
def test_a_worker_killed_in_a_run_loses_nothing(serial, tmp_path):
    out = tmp_path / "study"
    with cluster(tmp_path, workers=2) as dask:
        command = dask.study(STUDY, out)

        def is_in_a_run():
            """Stops a worker; it is in a run if both are: each makes one at a time."""
            dask.workers[0].kill(signal.SIGSTOP)
            if len(beneath(out, ".seed-*")) == 2:
                return True
            dask.workers[0].kill(signal.SIGCONT)
            return False

        command.wait_for(r"run 1/10 ")
        until(is_in_a_run, "both workers are in a run")
        dask.workers[0].kill()
        command.wait_for(r": the Dask worker tcp://\S+ is gone; the run starts again")
        command.ended(5 * TIMEOUT).with_code(0)
    check_same(out, serial)


@pytest.mark.long
def test_a_run_that_hangs_is_named(tmp_path):
    program = [sys.executable, "-c"]
    program += [
        "import sys; from experiments.study.main import main\n"
        "from experiments.study import jobs; jobs.SILENCE = 3.0\n"
        "sys.exit(main(sys.argv[1:]))"
    ]
    words = (
        "--algos sync_sgd --task support.tiny_tasks:drawing --seeds 1 --steps 100000"
    )
    words += " --eval-every 10"
    with cluster(tmp_path, workers=1) as dask:
        command = dask.study(words, tmp_path / "study", program)

        def lines():
            paths = beneath(tmp_path, "metrics.jsonl")
            return "".join(path.read_text() for path in paths).splitlines()

        until(lambda: len(lines()) > 2, "it takes steps")
        dask.workers[0].kill(signal.SIGSTOP)
        old_length = len(command.stderr_text)
        message = "sync_sgd, seed 0: no step for 3 s on the Dask worker tcp://"
        until(lambda: message in command.stderr_text[old_length:], "it is named")
        assert command.process.poll() is None
        command.kill(signal.SIGINT)
        assert command.ended().code == 130


@pytest.mark.long
def test_a_lost_scheduler_ends_the_command_which_goes_on_later(serial, tmp_path):
    out = tmp_path / "study"
    with cluster(tmp_path, workers=2) as dask:
        command = dask.study(STUDY, out)
        command.wait_for(r"run 2/10 ")
        dask.scheduler.kill()
        ended = command.ended()
        assert ended.code == 75
        assert "the Dask scheduler is lost" in ended.stderr.splitlines()[-1]
        assert 2 <= len(runs_done(out)) < 10
        until(lambda: not tagged(dask.tag), "its workers end")
        assert list(out.rglob(".s*")) == []
        dask.start_scheduler()
        dask.worker()
        dask.study(STUDY, out).ended(5 * TIMEOUT).with_code(0)
    check_same(out, serial)


@pytest.mark.slow
def test_unfit_workers_are_barred_by_name_before_they_get_work(tmp_path):
    """They have other code, other versions, no code of ours, or none of the data.

    Where a folder can be mounted, one does not see the study's.
    """
    names = "data", "other", "older", "lacking", "hidden"
    data, other, older, lacking, hidden = (tmp_path / x for x in names)
    data.touch()
    for name in ("experiments", "syncalgos", "models"):
        shutil.copytree(ROOT / name, other / name)
    with (other / "syncalgos" / "checks.py").open("a") as file:
        file.write("# another version\n")
    (older / "numpy-0.1.dist-info").mkdir(parents=True)
    (older / "numpy-0.1.dist-info" / "METADATA").write_text("Name: numpy\nVersion: 0.1")
    lacking.mkdir()
    hidden.mkdir()
    hide = f'mount -t tmpfs none {hidden} && exec "$@"'
    blind = "unshare", "--mount", "bash", "-c", hide, "bash"
    (lacking / "experiments.py").touch()
    words = "--algos sync_sgd --task support.tiny_tasks:local --seeds 2 --steps 10"
    words += " --eval-every 10 --step-time 0.001"
    out = hidden / "study"
    reasons = [
        "code of syncalgos: '[0-9a-f]+' there, '[0-9a-f]+' here",
        "numpy: '0.1' there, '[0-9.]+' here",
        "ModuleNotFoundError: No module named 'experiments.study'",
        ".*nothing.*: No such file or directory",
    ]
    with cluster(tmp_path, TINY_DATA=data) as dask:
        dask.worker(("env", "-C", str(other)), PYTHONPATH=f"{other}:{OURS}")
        dask.worker(PYTHONPATH=f"{older}:{OURS}", PYTHONSAFEPATH=1)
        dask.worker(PYTHONPATH=f"{lacking}:{OURS}", PYTHONSAFEPATH=1)
        dask.worker(TINY_DATA=tmp_path / "nothing")
        if not subprocess.run([*blind, "true"], capture_output=True).returncode:
            dask.worker(blind)
            reasons.append(
                r"\S+/study: No such file or directory: workers must see the "
            )
        command = dask.study(words, out)
        for reason in reasons:
            command.wait_for(rf"the Dask worker tcp://\S+ is refused: {reason}")
        assert runs_done(out) == []
        dask.worker()
        ended = command.ended(5 * TIMEOUT).with_code(0)
    assert ended.stderr.count("is refused") == len(reasons)
    assert "Traceback" not in ended.stderr


@pytest.mark.long
def test_tls_keeps_strangers_out(tmp_path):
    files = certificates(tmp_path)
    words = "--algos sync_sgd --task support.tiny_tasks:drawing --seeds 1 --steps 10"
    with cluster(tmp_path, 1, ("--protocol", "tls"), **files) as dask:
        assert dask.address.startswith("tls://")
        stranger = dict.fromkeys(files)
        refused = dask.study(words, tmp_path / "stranger", **stranger).ended()
        assert refused.code == 2
        assert "tls:// needs certificates" in refused.stderr
        (tmp_path / "foreign").mkdir()
        foreign = certificates(tmp_path / "foreign")
        refused = dask.study(words, tmp_path / "stranger", **foreign).ended()
        assert refused.code == 2
        assert "do not trust each other's certificates" in refused.stderr
        assert dask.study(words, tmp_path / "study").ended(5 * TIMEOUT).code == 0
