"""Studies by jobs: a plan of their runs, a real scheduler, real workers, and faults."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess

import pytest
from commands import ROOT, TIMEOUT, environment, execute, imported_by
from dask_cluster import certificates, cluster
from experiments.launch.cluster.connection import cluster as dask_of_command
from experiments.launch.cluster.connection import dashboard
from experiments.launch.supervisor.limits import Limits
from faults import until
from hypothesis import given, settings
from hypothesis import strategies as st
from lasting import OURS
from studies import COMPARE, but_for_times, change, runs_done
from test_study_analysis import write

from benchmarks.harness.jobs import RECORDS, bound, measured, simulated
from experiments.compare import main
from experiments.study.grid import RunSet
from experiments.study.running import member
from experiments.study.running.messages import Made, Noted, Refused
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
    busy, made, lost = [], [], 0
    while not plan.is_over:
        while len(busy) < jobs and (share := plan.take(jobs)):
            busy.append(share)
        share = busy.pop(order.randrange(len(busy)))
        if lost < 3 and order.random() < 0.2:
            lost += 1
            plan.give_back(share)
            continue
        run = share.runs[0]
        if not run.runs.is_trial:
            assert sum(x.startswith(f"{run.runs.name} ") for x in made) == trials
        made.append(run.name)
        plan.ended(share, Made(""))
        if share.runs:
            busy.append(share)
    assert len({*made}) == len(made) == plan.total == plan.done
    assert plan.total == variants * (trials + seeds)


@pytest.mark.parametrize(
    "jobs, lengths", [(1, [7, 7]), (2, [7, 4, 2, 1]), (5, [3, 3, 1, 2, 1, 1, 1, 1, 1])]
)
def test_a_job_takes_its_part_of_what_waits(jobs, lengths, tmp_path):
    plan = plan_of(planned(tmp_path, variants=2, seeds=7, trials=0))
    shares = [*iter(lambda: plan.take(jobs), None)]
    assert [len(share.runs) for share in shares] == lengths
    seeds = sorted(run.seed for share in shares for run in share.runs)
    assert seeds == sorted(2 * [*range(7)])


def test_a_job_takes_all_values_of_a_variant_before_the_next(tmp_path):
    plan = plan_of(planned(tmp_path, variants=3, seeds=1, trials=4))
    for share, label in zip(iter(plan.take, None), ["v0", "v1", "v2"], strict=False):
        assert {run.runs.variant.label for run in share.runs} == {label}
        assert [run.runs.values["lr"] for run in share.runs] == [
            "0.1",
            "0.2",
            "0.3",
            "0.4",
        ]


def test_runs_that_are_there_are_not_planned(tmp_path):
    sets = planned(tmp_path, variants=1, seeds=3, trials=0)
    sets[0].run(0).mkdir(parents=True)
    for seed, stopped in ((1, False), (2, True)):
        write(sets[0].run(seed), "bmuf", (0.1, 0.2, 0.3), stopped=stopped)
    plan = Plan(sets, lambda made: made)
    assert [seed for _, seed in plan.waiting()] == [0, 2]
    assert (plan.done, plan.total) == (1, 3)


def test_failed_trials_leave_their_variant_without_runs_alone(tmp_path):
    sets = planned(tmp_path, variants=2, seeds=2, trials=1)
    plan = Plan(sets, lambda made: None if made.number == 0 else made)
    while share := plan.take():
        while share.runs:
            is_bad = share.runs[0].name.startswith("v0")
            plan.ended(share, Refused("bad") if is_bad else Made(""))
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


@pytest.mark.sample(0, slow=1)
@pytest.mark.parametrize("devices, flag", [(1, ""), (2, "--devices-per-job 1")])
def test_jobs_here_make_the_same_study(serial, devices, flag, tmp_path):
    out = tmp_path / "study"
    ended = study(f"{STUDY} --jobs 2 {flag}", out, JAX_NUM_CPU_DEVICES=devices)
    assert ended.code == 0, ended.stderr
    assert re.search(r"dashboard: http://127\.0\.0\.1:\d+/status", ended.stderr)
    assert hashes(out) == hashes(serial)
    if not flag:
        check_same(out, serial)


# Signs of life.


@pytest.mark.slow
def test_a_process_that_is_stopped_is_lost_and_one_that_is_busy_is_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(member, "LIMITS", Limits(lost_after=3.0))
    monkeypatch.setattr(member, "STUCK", 4.0)
    heard = []

    def hear(message):
        heard.append(message)
        stuck = re.search(
            r"pid (\d+)\) lives, but has taken no step for 4 s", str(message)
        )
        if stuck and Noted("waiting in load") in heard:
            os.kill(int(stuck[1]), signal.SIGSTOP)

    first = ["--task", "tests.support.tiny_tasks:endless"]
    order = member.Order("study", str(ROOT), {}, {}, {}, first)
    ended = member.watched(order, tmp_path, hear, lambda: True)
    assert re.search(r"no sign of life for 3 s \(it was stopped\)$", ended.line)
    assert ended.fault == "run"


# Jobs on a cluster.


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_workers_makes_the_same_study(serial, workers, tmp_path):
    """Also workers of other settings: a study's processes take the command's."""
    out = tmp_path / "study"
    with cluster(tmp_path, workers=workers, JAX_ENABLE_X64=1) as dask:
        ended = dask.study(STUDY, out, JAX_ENABLE_X64=None).ended(5 * TIMEOUT)
    assert ended.code == 0, ended.stderr
    check_same(out, serial)


@pytest.mark.slow
def test_killed_and_stopped_processes_and_a_killed_worker_lose_nothing(
    serial, tmp_path
):
    out = tmp_path / "study"
    with cluster(tmp_path, workers=2) as dask:
        command = dask.study(STUDY, out)
        command.wait_for(r"run 2/10 ")
        until(dask.makers, "a process makes runs")
        os.kill(dask.makers()[0], signal.SIGKILL)
        command.wait_for("its process was killed by SIGKILL; the run starts again")
        # One that makes nothing may die unseen before the study ends.
        until(dask.makers, "a process makes runs")
        lost = dask.makers()[0]
        dask.worker_of(lost).kill()
        command.wait_for(r"worker tcp://\S+ on \S+ is gone; the run starts again")
        # The killed worker's process outlives it for a moment; the one to stop is of
        # the last worker, so that no other ends the study meanwhile.
        until(lambda: lost not in dask.makers(), "the killed worker's process ends")
        until(dask.makers, "a process makes runs")
        os.kill(dask.makers()[0], signal.SIGSTOP)
        command.wait_for(r"of life for 20 s \(it was stopped\); the run starts again")
        ended = command.ended(5 * TIMEOUT)
        assert ended.code == 0, ended.stderr
    check_same(out, serial)


@pytest.mark.long
def test_a_lost_scheduler_ends_the_command_which_goes_on_later(serial, tmp_path):
    out = tmp_path / "study"
    with cluster(tmp_path, workers=2) as dask:
        command = dask.study(STUDY, out)
        command.wait_for(r"run 2/10 ")
        dask.scheduler.kill()
        ended = command.ended()
        assert ended.code == 75
        assert re.search("scheduler .* is lost", ended.stderr.splitlines()[-1])
        until(lambda: not dask.makers(), "its processes end")
        assert 2 <= len(runs_done(out)) < 10
        dask.start_scheduler()
        dask.worker()
        ended = dask.study(STUDY, out).ended(5 * TIMEOUT)
        assert ended.code == 0, ended.stderr
    check_same(out, serial)


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
    out = tmp_path / "study"
    with cluster(tmp_path, workers=2) as dask:
        command = dask.study(STUDY, out)
        command.wait_for(r"run 2/10 ")
        command.kill(number)
        assert command.ended().code == code
        until(lambda: not dask.makers(), "its processes end")
        if code != -9:
            assert re.search(r"stopped after \d+ of 10 runs", command.said)
            assert list(out.rglob(".seed-*")) == []
        ended = dask.study(STUDY, out).ended(5 * TIMEOUT)
        assert ended.code == 0, ended.stderr
    check_same(out, serial)


@pytest.mark.long
def test_a_run_that_kills_its_process_is_given_up(tmp_path):
    words = f"--algos sync_sgd,bmuf --task tiny_tasks:unlucky --ends kill {FLAGS}"
    out = tmp_path / "study"
    with cluster(tmp_path, workers=2) as dask:
        ended = dask.study(words, out).ended(5 * TIMEOUT)
    assert ended.code == 1
    assert {run.name for run in runs_done(out)} == {"seed-0", "seed-2"}
    for label in ("sync_sgd", "bmuf"):
        assert ended.stderr.count(f"{label}, seed 1: its process was killed") == 2
        assert f"failed: {label}, seed 1: given up after 3 times" in ended.stderr
    assert "1 of 3 runs failed and is missing" in ended.stdout
    again = study(f"{words} --jobs 2", out)
    assert again.code == 1
    assert again.stderr.splitlines()[0] == "4 of 6 runs are already complete"
    assert "2 of 6 runs failed" in again.stderr


@pytest.mark.slow
def test_unfit_workers_are_refused_by_name_before_they_get_work(tmp_path):
    """One of other code, and one without the task's data."""
    data = tmp_path / "data"
    data.touch()
    other = tmp_path / "other"
    for name in ("experiments", "syncalgos", "models"):
        shutil.copytree(ROOT / name, other / name)
    with (other / "syncalgos" / "checks.py").open("a") as file:
        file.write("# another version\n")
    words = "--algos sync_sgd --task tiny_tasks:local --seeds 2 --steps 10"
    words += " --eval-every 10 --step-time 0.001"
    out = tmp_path / "study"
    with cluster(tmp_path, TINY_DATA=data) as dask:
        prefix = ("env", "-C", str(other))
        dask.worker(prefix, PYTHONPATH=f"{other}:{OURS}")
        dask.worker(TINY_DATA=tmp_path / "nothing")
        command = dask.study(words, out)
        command.wait_for(
            r"the Dask worker tcp://\S+ \(pid \d+ on \S+\) is refused: its copy of "
        )
        command.wait_for(r"the Dask worker tcp://\S+ on \S+ is refused: .*nothing")
        assert runs_done(out) == []
        dask.worker()
        ended = command.ended(5 * TIMEOUT)
        assert ended.code == 0, ended.stderr
        assert ended.stderr.count("is refused") == 2


@pytest.mark.long
def test_without_a_shared_folder_results_come_through_the_scheduler(serial, tmp_path):
    hide = f'mount -t tmpfs none {tmp_path / "mine"} && exec "$@"'
    (tmp_path / "mine").mkdir()
    prefix = ("unshare", "--mount", "bash", "-c", hide, "bash")
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("a hidden folder takes the right to mount one")
    out = tmp_path / "mine" / "study"
    with cluster(tmp_path) as dask:
        dask.worker(prefix)
        ended = dask.study(STUDY, out).ended(5 * TIMEOUT)
    assert ended.code == 0, ended.stderr
    check_same(out, serial)


@pytest.mark.slow
def test_tls_keeps_strangers_out(tmp_path):
    files = certificates(tmp_path)
    words = "--algos sync_sgd --task tiny_tasks:drawing --seeds 1 --steps 10"
    with cluster(tmp_path, workers=1, flags=_tls(files), **files) as dask:
        assert dask.address.startswith("tls://")
        stranger = {name: None for name in files}
        refused = dask.study(words, tmp_path / "stranger", **stranger).ended()
        assert refused.code == 2
        assert "tls:// needs certificates" in refused.stderr
        assert dask.study(words, tmp_path / "study").ended(5 * TIMEOUT).code == 0


def _tls(files):
    found = {name.rpartition("__")[2]: path for name, path in files.items()}
    return (
        *("--tls-ca-file", found["CA_FILE"]),
        *("--tls-cert", found["CERT"]),
        *("--tls-key", found["KEY"]),
    )


@pytest.mark.parametrize("workers", [1, 2, 4, 10, 30, 100, 300])
def test_committed_studies_take_little_more_than_the_least_time(workers):
    """Simulated from the seconds of their runs, by the plan that hands them out."""
    for folder in sorted(path.parent for path in RECORDS.glob("*/summaries.jsonl")):
        runs = measured(folder)
        taken, least = simulated(*runs, workers), bound(*runs, workers)
        assert 0.999 <= taken / least <= 1.2


def test_a_cluster_of_this_command_listens_here_alone():
    psutil = pytest.importorskip("psutil")

    def listening():
        found = psutil.Process().net_connections(kind="inet")
        return {x.laddr for x in found if x.status == psutil.CONN_LISTEN}

    before = listening()
    with dask_of_command(None, 2) as client:
        assert dashboard(client).startswith("http://127.0.0.1:")
        places = listening() - before
        assert places
        assert {place.ip for place in places} == {"127.0.0.1"}
