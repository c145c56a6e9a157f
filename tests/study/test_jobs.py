"""Studies by jobs: a plan of their runs, a real scheduler, real workers, and faults."""

import importlib.util
import json
import re
import shutil
import signal
import subprocess
import sys
import uuid

import pytest
from commands import (
    ROOT,
    TIMEOUT,
    beneath,
    environment,
    execute,
    imported_by,
    printed_by,
)
from dask_cluster import certificates, cluster
from faults import Command, tagged, until
from hypothesis import given, settings
from hypothesis import strategies as st
from lasting import OURS
from studies import COMPARE, but_for_times, change, runs_done
from test_study_analysis import write

from experiments.compare import main
from experiments.study.grid import RunSet
from experiments.study.running.cluster import cluster as of_command
from experiments.study.running.maker import Made, Refused
from experiments.study.running.plan import Plan
from experiments.study.spec import Variant
from experiments.training.config import RunConfig

# Two variants, each at two rates on held-out data, then three seeds at the best.
FLAGS = "--period 5 --seeds 3 --steps 20 --eval-every 10 --step-time 0.001"
STUDY = f"--algos 'sync_sgd, NBM=bmuf --nesterov' --task tiny_tasks:drawing {FLAGS}"
STUDY += " --tune lr=0.02,0.1"
OWN = {"PYTHONPATH": OURS}


def hashes(out):
    """The params of every run, by its folder in the study."""
    return {
        str(run.relative_to(out)): json.loads((run / "summary.json").read_text())[
            "params_sha256"
        ]
        for run in runs_done(out)
    }


def study(words, out, **environ):
    """Makes a study by a command without a scheduler."""
    return execute(words, out, COMPARE, 5 * TIMEOUT, **OWN, **environ)


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """The study as one process makes it."""
    out = tmp_path_factory.mktemp("serial") / "study"
    ended = study(STUDY, out, JAX_NUM_CPU_DEVICES=1)
    assert ended.code == 0, ended.stderr
    assert len(hashes(out)) == 10
    return out


def check_same(out, serial):
    """Compares all that two studies of one command share."""
    assert hashes(out) == hashes(serial)
    assert but_for_times(out) == but_for_times(serial)
    assert [x for x in out.rglob(".s*")] == []


# The plan.


def planned(folder, variants=2, seeds=3, trials=2):
    """Run sets with trials, in an empty folder."""

    def run_set(number, **changes):
        variant = Variant(f"v{number}", "sync_sgd")
        own = RunSet(variant, number, "", RunConfig(), folder, range(seeds))
        return own._replace(**changes)

    def trial(number, value):
        held_out, own = RunConfig(validation=0.1), range(1000, 1001)
        return run_set(number, common=held_out, seeds=own, values={"lr": value})

    values = [str(i / 10) for i in range(1, trials + 1)]
    return [
        run_set(number, trials=[trial(number, value) for value in values])
        for number in range(variants)
    ]


def plan_of(sets):
    return Plan(sets, lambda made: made._replace(values={"lr": "0.1"}))


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
    folder = tmp_path_factory.mktemp("plan")
    plan = plan_of(planned(folder, variants, seeds, trials))
    busy, made, lost, last = [], [], 0, None
    while not plan.is_over:
        while len(busy) < jobs and (run := plan.take(last)):
            busy.append(run)
        run = busy.pop(order.randrange(len(busy)))
        last = order.choice([None, run.number])
        if lost < 3 and order.random() < 0.2:
            lost += 1
            plan.give_back(run)
            continue
        if not run.runs.is_trial:
            assert sum(x.startswith(f"{run.runs.name} ") for x in made) == trials
        made.append(run.name)
        plan.ended(run, Made(""))
    assert len({*made}) == len(made) == plan.total == plan.done
    assert plan.total == variants * (trials + seeds)


def test_a_job_stays_with_its_variant_or_begins_one_that_no_other_job_has(tmp_path):
    plan = plan_of(planned(tmp_path, variants=3, seeds=1, trials=2))
    first, second = plan.take(), plan.take()
    assert first and second and (first.number, second.number) == (0, 1)
    plan.ended(second, Made(""))
    third = plan.take(second.number)
    assert third and third.number == second.number
    plan.ended(first, Made(""))
    rest = [plan.take(1) for _ in range(3)]
    assert [run.number for run in rest if run] == [0, 2, 2]


def test_runs_that_are_there_are_not_planned(tmp_path):
    sets = planned(tmp_path, variants=1, seeds=3, trials=0)
    sets[0].run(0).mkdir(parents=True)
    for seed, stopped in ((1, False), (2, True)):
        write(sets[0].run(seed), "bmuf", (0.1, 0.2, 0.3), stopped=stopped)
    plan = Plan(sets, lambda made: made)
    assert [run.seed for run in plan.waiting] == [0, 2]
    assert (plan.done, plan.total) == (1, 3)


def test_failed_trials_leave_their_variant_without_runs_alone(tmp_path):
    sets = planned(tmp_path, variants=2, seeds=2, trials=1)
    plan = Plan(sets, lambda made: None if made.number == 0 else made)
    while run := plan.take():
        is_bad = run.name.startswith("v0")
        plan.ended(run, Refused("bad") if is_bad else Made(""))
    assert [x is None for x in plan.found] == [True, False]
    assert [x.line for x in plan.failures][-1].startswith("all of its trials failed")


# Command lines.


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--jobs 2 --scheduler tcp://127.0.0.1:1", "--jobs"),
        ("--jobs 0", "--jobs"),
        ("--list --jobs 2", "--list"),
        ("--devices-per-job 0", "--devices-per-job"),
        ("--scheduler nowhere", "scheduler file"),
        ("--scheduler tls://127.0.0.1:1", "certificates"),
    ],
)
def test_flags_that_cannot_be_are_one_line(flags, said, tmp_path):
    ended = execute(f"--algos sync_sgd --steps 8 {flags}", tmp_path / "out", COMPARE)
    assert ended.code == 2
    assert said in ended.stderr.splitlines()[-1]


def test_without_dask_a_study_is_serial_and_jobs_say_what_to_install(
    tmp_path, monkeypatch, capsys
):
    assert not {"dask", "distributed"} & imported_by(
        "from experiments.study import study"
    )
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: find(name) if name != "distributed" else None,
    )
    assert main(["--jobs", "2", "--out", str(tmp_path / "out")]) == 2
    assert "pip install -e '.[cluster]'" in capsys.readouterr().err


@pytest.mark.slow
def test_list_prints_commands_that_make_the_study(serial, tmp_path):
    out = tmp_path / "study"
    environ = environment(JAX_NUM_CPU_DEVICES=1, **OWN)
    for missing, known in ((10, 4), (6, 6)):
        listed = study(f"{STUDY} --list", out, JAX_NUM_CPU_DEVICES=1)
        assert listed.code == 0, listed.stderr
        lines = listed.stdout.splitlines()
        assert len(lines) == known
        assert f"{known} of 10 runs are listed" in listed.stderr
        assert ("more depend on these trials" in listed.stderr) == (missing > known)
        script = tmp_path / "commands.sh"
        script.write_text("set -e\n" + listed.stdout)
        subprocess.run(
            ["bash", script], cwd=ROOT, env=environ, check=True, timeout=5 * TIMEOUT
        )
    ended = study(STUDY, out, JAX_NUM_CPU_DEVICES=1)
    assert ended.code == 0
    assert ended.stderr.splitlines()[0] == "10 of 10 runs are already complete"
    assert hashes(out) == hashes(serial)
    assert but_for_times(out) == but_for_times(serial)
    listed = study(f"{STUDY} --list", out)
    assert (listed.stdout.strip(), listed.code) == ("", 0)
    assert "all 10 runs are complete" in listed.stderr


@pytest.mark.slow
def test_a_failed_run_is_named_and_the_others_go_on(tmp_path):
    out = tmp_path / "study"
    ended = study(f"--algos sync_sgd,bmuf --task tiny_tasks:unlucky {FLAGS}", out)
    assert ended.code == 1
    assert {run.name for run in runs_done(out)} == {"seed-0", "seed-2"}
    for label in ("sync_sgd", "bmuf"):
        assert re.search(f"failed: {label}, seed 1: .*no luck", ended.stderr)
    assert "2 of 6 runs failed" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "1 of 3 runs failed and is missing" in ended.stdout
    assert (out / "report.html").exists()


@pytest.mark.slow
def test_a_run_that_was_stopped_is_made_again(tmp_path):
    """As a command of --list that SIGTERM has stopped: its summary says so."""
    words = f"--algos sync_sgd --task tiny_tasks:drawing {FLAGS.replace('3', '1')}"
    words = words.replace("--period 5 ", "")
    out = tmp_path / "study"
    assert study(words, out).code == 0
    before = hashes(out)
    (path,) = out.rglob("summary.json")
    change(path.parent, stopped=True)
    again = study(words, out)
    assert again.code == 0, again.stderr
    assert "run 1/1 " in again.stderr
    assert hashes(out) == before
    assert json.loads(path.read_text())["stopped"] is False


@pytest.mark.slow
def test_a_scheduler_that_is_not_there_costs_no_old_study(
    tmp_path, monkeypatch, capsys
):
    words = ["--algos", "sync_sgd", "--seeds", "1", "--steps", "8", "--out"]
    words += [str(tmp_path / "study")]
    assert main(words) == 0
    before = hashes(tmp_path / "study")
    monkeypatch.setattr("experiments.study.study.ANSWER", 1.0)
    gone = ["--seeds", "2", "--scheduler", "tcp://127.0.0.1:1"]
    assert main([*words, *gone]) == 4
    assert ": no answer: " in capsys.readouterr().err
    assert hashes(tmp_path / "study") == before


# Jobs here.


def test_jobs_make_the_same_runs_as_one_process(tmp_path):
    words = f"--algos 'sync_sgd, bmuf --period 5' --task tiny_tasks:drawing {FLAGS}"
    words = words.replace("--period 5 --seeds 3", "--seeds 2")
    for name, jobs in (("serial", ""), ("jobs", "--jobs 2")):
        ended = study(f"{words} {jobs}", tmp_path / name, JAX_NUM_CPU_DEVICES=1)
        assert ended.code == 0, ended.stderr
    assert hashes(tmp_path / "jobs") == hashes(tmp_path / "serial")


@pytest.mark.slow
@pytest.mark.parametrize("devices, flag", [(1, ""), (2, "--devices-per-job 1")])
def test_jobs_make_the_same_tuned_study(serial, devices, flag, tmp_path):
    out = tmp_path / "study"
    ended = study(f"{STUDY} --jobs 2 {flag}", out, JAX_NUM_CPU_DEVICES=devices)
    assert ended.code == 0, ended.stderr
    assert hashes(out) == hashes(serial)
    if not flag:
        check_same(out, serial)


@pytest.mark.slow
def test_a_script_needs_no_guard_of_its_main_module(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from experiments import compare\n"
        "flags = {'task': 'digits', 'workers': 2, 'steps': 8, 'jobs': 2}\n"
        "print(len(compare('sync_sgd, bmuf', seeds=1, flags=flags).runs))\n"
    )
    said, _ = printed_by(script, tmp_path, 5 * TIMEOUT)
    assert said == "2\n"


@pytest.mark.parametrize(
    "number, code",
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 75, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.long),
    ],
)
def test_a_stopped_command_leaves_no_process_and_goes_on(
    serial, number, code, tmp_path
):
    out, tag = tmp_path / "study", uuid.uuid4().hex
    given = (f"{STUDY} --jobs 2", out, tag, 0, 1, {}, COMPARE)
    command = Command(*given)
    command.wait_for(r"run 2/10 ")
    command.kill(number)
    assert command.ended().code == code
    until(lambda: not tagged(tag), "no process is left")
    if code != -9:
        assert re.search(r"stopped after \d+ of 10 runs", command.said)
        assert list(out.rglob(".s*")) == []
    ended = study(f"{STUDY} --jobs 2", out, JAX_NUM_CPU_DEVICES=1)
    assert ended.code == 0, ended.stderr
    assert re.match(r"[2-9] of 10 runs are already complete", ended.stderr)
    check_same(out, serial)


@pytest.mark.long
def test_a_run_that_kills_its_worker_is_given_up(tmp_path):
    words = f"--algos sync_sgd,bmuf --task tiny_tasks:unlucky --ends kill {FLAGS}"
    ended = study(f"{words} --jobs 2", tmp_path / "study")
    assert ended.code == 1
    assert {run.name for run in runs_done(tmp_path / "study")} == {"seed-0", "seed-2"}
    for label in ("sync_sgd", "bmuf"):
        assert ended.stderr.count(f"{label}, seed 1: the Dask worker") == 2
        assert f"failed: {label}, seed 1: given up after 3 times" in ended.stderr
    assert "2 of 6 runs failed" in ended.stderr


def test_the_cluster_of_a_command_listens_here_alone():
    psutil = pytest.importorskip("psutil")
    this = psutil.Process()

    def listening():
        found = [this, *this.children(recursive=True)]
        places = [x for p in found for x in p.net_connections(kind="inet")]
        return {x.laddr for x in places if x.status == psutil.CONN_LISTEN}

    before = listening()
    with of_command(None, 1) as client:
        client.wait_for_workers(1, TIMEOUT)
        places = listening() - before
        assert len(places) > 2  # the scheduler, its pages, and the worker
        assert {place.ip for place in places} == {"127.0.0.1"}


# Jobs on a cluster.


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
        ended = command.ended(5 * TIMEOUT)
    assert ended.code == 0, ended.stderr
    check_same(out, serial)


@pytest.mark.slow
def test_a_run_that_hangs_is_named(tmp_path):
    program = [sys.executable, "-c"]
    program += [
        "import sys; from experiments.compare import main\n"
        "from experiments.study.running import jobs; jobs.SILENCE = 3.0\n"
        "sys.exit(main(sys.argv[1:]))"
    ]
    words = "--algos sync_sgd --task tiny_tasks:drawing --seeds 1 --steps 100000"
    words += " --eval-every 10"
    with cluster(tmp_path, workers=1) as dask:
        command = dask.study(words, tmp_path / "study", program)

        def lines():
            paths = beneath(tmp_path, "metrics.jsonl")
            return [x for path in paths for x in path.read_text().splitlines()]

        until(lambda: len(lines()) > 2, "it takes steps")
        dask.workers[0].kill(signal.SIGSTOP)
        before = len(command.said)
        named = "sync_sgd, seed 0: no step for 3 s on the Dask worker tcp://"
        until(lambda: named in command.said[before:], "it is named")
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
        ended = dask.study(STUDY, out).ended(5 * TIMEOUT)
    assert ended.code == 0, ended.stderr
    check_same(out, serial)


@pytest.mark.slow
def test_unfit_workers_are_barred_by_name_before_they_get_work(tmp_path):
    """They have other code, other versions, no code of ours, or none of the data."""
    data, other, older, lacking = (
        tmp_path / x for x in ("data", "other", "older", "lacking")
    )
    data.touch()
    for name in ("experiments", "syncalgos", "models"):
        shutil.copytree(ROOT / name, other / name)
    with (other / "syncalgos" / "checks.py").open("a") as file:
        file.write("# another version\n")
    (older / "numpy-0.1.dist-info").mkdir(parents=True)
    (older / "numpy-0.1.dist-info" / "METADATA").write_text("Name: numpy\nVersion: 0.1")
    lacking.mkdir()
    (lacking / "experiments.py").touch()
    words = "--algos sync_sgd --task tiny_tasks:local --seeds 2 --steps 10"
    words += " --eval-every 10 --step-time 0.001"
    out = tmp_path / "study"
    reasons = [
        "code of syncalgos: '[0-9a-f]+' there, '[0-9a-f]+' here",
        "numpy: '0.1' there, '[0-9.]+' here",
        "ModuleNotFoundError: No module named 'experiments.study'",
        ".*FileNotFoundError: .*nothing",
    ]
    with cluster(tmp_path, TINY_DATA=data) as dask:
        dask.worker(("env", "-C", str(other)), PYTHONPATH=f"{other}:{OURS}")
        dask.worker(PYTHONPATH=f"{older}:{OURS}", PYTHONSAFEPATH=1)
        dask.worker(PYTHONPATH=f"{lacking}:{OURS}", PYTHONSAFEPATH=1)
        dask.worker(TINY_DATA=tmp_path / "nothing")
        command = dask.study(words, out)
        for reason in reasons:
            command.wait_for(rf"the Dask worker tcp://\S+ is refused: {reason}")
        assert runs_done(out) == []
        dask.worker()
        ended = command.ended(5 * TIMEOUT)
    assert ended.code == 0, ended.stderr
    assert ended.stderr.count("is refused") == 4
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_worker_that_does_not_see_the_studys_folder_is_barred(tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    hide = f'mount -t tmpfs none {hidden} && exec "$@"'
    prefix = ("unshare", "--mount", "bash", "-c", hide, "bash")
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("a hidden folder takes the right to mount one")
    words = "--algos sync_sgd --task tiny_tasks:drawing --seeds 1 --steps 10"
    with cluster(tmp_path) as dask:
        dask.worker(prefix)
        command = dask.study(words, hidden / "study")
        command.wait_for(
            r"is refused: \S+/study: No such file or directory: workers must see the "
        )
        dask.worker()
        ended = command.ended(5 * TIMEOUT)
    assert ended.code == 0, ended.stderr


@pytest.mark.slow
def test_tls_keeps_strangers_out(tmp_path):
    files = certificates(tmp_path)
    words = "--algos sync_sgd --task tiny_tasks:drawing --seeds 1 --steps 10"
    with cluster(tmp_path, 1, ("--protocol", "tls"), **files) as dask:
        assert dask.address.startswith("tls://")
        stranger = dict.fromkeys(files)
        refused = dask.study(words, tmp_path / "stranger", **stranger).ended()
        assert refused.code == 2
        assert "tls:// needs certificates" in refused.stderr
        assert dask.study(words, tmp_path / "study").ended(5 * TIMEOUT).code == 0
