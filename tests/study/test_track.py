"""The sync track: entries, their logs, and what tells that a claim does not hold."""

import hashlib
import json
import sys
from functools import partial

import numpy as np
import pytest
from commands import ROOT, ran
from pages import track as page

from experiments import files
from experiments.command.errors import BadRequest
from experiments.study import presets, track
from experiments.study.runs import Loader
from syncalgos.network import Sends

ENTRIES = sorted((ROOT / "docs" / "track").rglob("*.py"))
FIXED = """
[flags]
task = "digits"
workers = 4
batch-size = 32
steps = 12
dispatch-steps = 12
algos = ["sync_sgd"]
seeds = 3
target = 0.01
network = ["10gbe", "dsl"]
fused = true
step-time = 0.5
"""
ENTRY = '''
"""Averages every other step.

At half the rate.
"""

import syncalgos

FLAGS = "--lr 0.1 --steps 8"


def strategy():
    return syncalgos.model_averaging(2)
'''
MADE = "return syncalgos.model_averaging(2)"
PARAMS = 4 * (64 * 128 + 128 + 128 * 128 + 128 + 128 * 10 + 10)
ALL_REDUCE = 2 * 3 / 4 * PARAMS
verify = partial(track.verify, first_seed=10, stopped=lambda: 0)


@pytest.fixture(scope="module", autouse=True)
def small(tmp_path_factory):
    """A track of so few steps that it proves nothing."""
    path = tmp_path_factory.mktemp("preset") / "small.toml"
    path.write_text(FIXED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.FILES, track.PRESETS[0], path)
        yield


@pytest.fixture(scope="module")
def logged(tmp_path_factory, small):
    """An entry that has run; its folder is not to be changed."""
    path = tmp_path_factory.mktemp("entry") / "mine.py"
    path.write_text(ENTRY)
    assert track.run(path, lambda: 0) == 0
    return path


@pytest.fixture
def changed(logged, tmp_path):
    """Makes a copy of the entry with a log that a function has changed."""
    path = tmp_path / "mine.py"
    path.write_text(ENTRY)
    log = json.loads(logged.with_suffix(".json").read_text())

    def change(edit):
        edit(log)
        files.write_json(path.with_suffix(".json"), log, seal=track.SEAL)
        return path

    return change


@pytest.mark.slow
def test_a_log_has_the_code_the_seeds_and_what_was_sent(logged):
    log = json.loads(logged.with_suffix(".json").read_text())
    assert log["code"] == ENTRY
    assert log["sha256"] == hashlib.sha256(logged.read_bytes()).hexdigest()
    assert {"jax", "python", "devices"} <= log["versions"].keys()
    assert [run["seed"] for run in log["runs"]] == [0, 1, 2]
    assert len({run["params_sha256"] for run in log["runs"]}) == 3
    # Four syncs, and the mean that is evaluated; 6 hops each.
    sent = 5 * ALL_REDUCE
    assert log["found"]["bytes_per_worker"] == sent
    times = {
        "10gbe": 8 * 0.5 + sent / 1.25e9 + 5 * 6 * 24e-6,
        "dsl": 8 * 0.5 + sent / 1.225e6 + 5 * 6 * 49e-3,
    }
    assert log["found"]["seconds"] == pytest.approx(times)


@pytest.mark.slow
def test_a_claim_that_holds_is_repeated_to_the_bit(logged, capsys):
    assert verify(logged) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[1] == "logged 3 of 3 seeds come out bit-equal (the same versions)"
    assert told[2].endswith("seeds 10 to 12")
    assert told[3] == "holds"


@pytest.mark.slow
def test_falsified_figures_that_agree_with_each_other_are_told(
    changed, logged, capsys, monkeypatch
):
    rows = json.loads(logged.with_suffix(".json").read_text())["runs"]
    monkeypatch.setattr(track, "runs", lambda *_: rows)  # as they are made

    def falsify(log):
        for run in log["runs"]:
            run["bytes_per_worker"] /= 2
        log["runs"][1]["test_accuracy"] += 0.05
        log["found"] = track.figures(log["runs"], 0.01)
        log["versions"]["jax"] = "0.1"

    assert verify(changed(falsify)) == 1
    told = capsys.readouterr().out
    assert "doubt  seed 1: test_accuracy is " in told
    half = 2.5 * ALL_REDUCE
    assert f"doubt  bytes_per_worker is {half} in the log, and {2 * half} here" in told
    assert "(jax 0.1, here 0." in told
    assert told.endswith("does not hold\n")


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        (lambda log: log["runs"][1].update(params_sha256="0" * 64), True),
        (lambda log: log["versions"].update(devices="another"), False),
    ],
)
@pytest.mark.parametrize("failing", [False, True])
def test_other_params_of_the_same_versions_and_a_failed_draw_are_doubts(
    change, doubt, failing, changed, logged, capsys, monkeypatch
):
    rows = json.loads(logged.with_suffix(".json").read_text())["runs"]
    lucky = [x | {"test_accuracy": 0.5 + x["seed"] / 100} for x in rows]
    poor = [x | {"test_accuracy": x["seed"] / 100} for x in rows]
    made = iter([rows, poor if failing else lucky])
    monkeypatch.setattr(track, "runs", lambda *_: next(made))
    held = verify(changed(change)) == 0
    told = capsys.readouterr().out
    assert held is (not failing and not doubt)
    assert told.count("now ") == 1  # nobody draws until it fits
    assert ("doubt  seed 1: params_sha256 is" in told) is doubt
    assert ("these seeds do not show" in told) is failing


def test_a_mean_that_is_not_above_the_target_does_not_hold(logged, capsys, monkeypatch):
    rows = json.loads(logged.with_suffix(".json").read_text())["runs"]
    for accuracies in ([0.4, 0.5, 0.6], [None, 0.5, 0.6]):
        found = track.figures(
            [x | {"test_accuracy": y} for x, y in zip(rows, accuracies, strict=True)],
            0.5,
        )
        assert found["p"] >= 0.5
        doubts = [*track.contradicted({"found": found, "runs": rows}, rows, found)]
        assert len(doubts) == 2 and "do not show a mean above" in doubts[0]


CONTRADICTIONS = {
    "sha256": lambda log: log.update(sha256="0" * 64),
    "code": lambda log: log.update(code=ENTRY + "\n"),
    "words": lambda log: log["words"].append("--nesterov"),
    "target": lambda log: log.update(target=0.005),
    "p is": lambda log: log["found"].update(p=0.0),
    "are not 0 to 2": lambda log: log["runs"].pop(),
    "not 0 to 2": lambda log: log["runs"][2].update(seed=7),
    "seeds of the log": lambda log: log["runs"].append(log["runs"][0] | {"seed": 3}),
    "seconds of seed 1": lambda log: log["runs"][1]["seconds"].pop("dsl"),
    "seconds of seed 0": lambda log: [x["seconds"].clear() for x in log["runs"]],
    "10gbe is None in the log": lambda log: log["found"]["seconds"].pop("10gbe"),
    "dsl is None in the log": lambda log: log["found"].update(seconds={}),
    "10gbe": lambda log: log["runs"][0]["seconds"].update({"10gbe": 1.0}),
}


@pytest.mark.parametrize("named", CONTRADICTIONS)
def test_a_log_that_contradicts_its_entry_or_itself_is_told_at_once(
    named, changed, capsys
):
    assert verify(changed(CONTRADICTIONS[named])) == 1
    *doubts, ending = capsys.readouterr().out.splitlines()[1:]
    assert all(x.startswith("doubt  ") for x in doubts) and named in doubts[-1]
    assert ending == "does not hold"


def test_logged_seeds_are_refused(logged):
    with pytest.raises(BadRequest, match="--first-seed must be at least 3"):
        verify(logged, first_seed=2)


def test_a_file_that_is_no_log_is_not_replaced(tmp_path):
    path, other = tmp_path / "mine.py", tmp_path / "mine.json"
    path.write_text(ENTRY)
    other.write_text('{"mine": 1}')
    with pytest.raises(BadRequest, match=r"mine\.json: "):
        track.run(path, lambda: 0)
    assert other.read_text() == '{"mine": 1}'


LOCAL = "syncalgos.Strategy(center=lambda params, state: params)"


@pytest.mark.parametrize(
    ("made", "sent"),
    [
        (LOCAL, 1),  # the engine takes the mean of what differs
        ("syncalgos.Strategy()", 1),
        ("syncalgos.bmuf(4)", 1),
        ("syncalgos.Strategy(center=lambda *x: syncalgos.MeanCenter()(*x))", 2),
    ],
)
def test_the_model_that_is_evaluated_is_paid_for(made, sent, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(ENTRY.replace("syncalgos.model_averaging(2)", made))
    plan, _ = Loader().plan(track.read_entry(path).config)
    sends = track.center_sends(plan)
    [kind] = sends.steps
    assert sends.kinds[kind]["all_reduce"][0] == sent * ALL_REDUCE


def test_a_run_that_diverged_is_charged_for_all_of_its_steps(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(ENTRY)
    sends = {"kinds": [{}, {"all_reduce": [100.0, 1]}], "steps": "1*8", "delay": 0}
    own = {"seed": 0, "test_accuracy": 0.5, "bytes_per_worker": 200, "sends": sends}
    own |= {"params_sha256": "", "diverged": True}
    row = track.row_of(track.read_entry(path), own, Sends([{}], [0]))
    assert (row["test_accuracy"], row["bytes_per_worker"]) == (None, 800)


FREE = {
    "a part of the workers": "jax.lax.pmean(g, 'lanes')",
    "an unknown collective": "jax.lax.pbroadcast(g, syncalgos.WORKERS, 0)",
    "a batching rule": "jax.tree.map(averaged, g)",
}


@pytest.mark.parametrize("kind", FREE)
def test_bytes_that_the_ledger_cannot_see_have_no_score(kind, tmp_path):
    """Each of these once averaged the lanes of a device for nothing."""
    path = tmp_path / "mine.py"
    path.write_text(
        f"""
import jax, jax.numpy as jnp, syncalgos

FLAGS = "--lr 0.1 --steps 8"
averaged = jax.custom_batching.custom_vmap(lambda x: x)

@averaged.def_vmap
def mean(size, batched, x):
    return jnp.broadcast_to(x.mean(0, keepdims=True), x.shape), True

def strategy():
    return syncalgos.Strategy(reduce=lambda g, r, state, step: ({FREE[kind]}, state))
"""
    )
    with pytest.raises(BadRequest, match=r"cannot be counted|only supports a single"):
        track.run(path, lambda: 0)


def test_a_draw_is_evaluated_on_curves_that_no_entry_has_seen(real):
    entry = track.read_entry(ENTRIES[0])
    loader, other = Loader(), track.unseen(entry, 31000)
    seen, unseen = (loader.plan(x.config)[1] for x in (entry, other))
    assert entry.config.task_arguments["test_seed"] is None
    assert other.config.task_arguments["test_seed"] == 31000
    assert np.array_equal(seen.train["x"], unseen.train["x"])
    assert seen.test["x"].shape == unseen.test["x"].shape
    curves = [np.concatenate([seen.train["x"], seen.test["x"]]), unseen.test["x"]]
    assert not set.intersection(*({x.tobytes() for x in each} for each in curves))
    assert np.bincount(unseen.test["y"]).min() > 50  # all ten classes


def test_p_is_that_of_students_table():
    # With 9 degrees of freedom 2.262 leaves 2.5 % above it, 1.833 leaves 5 %.
    nothing = {"bytes_per_worker": 0, "seconds": {}}
    runs = [{"test_accuracy": 0.5 + x, **nothing} for x in [-0.1, 0.1] * 5]
    error = 0.1 * (10 / 9) ** 0.5 / 10**0.5
    for t, p in ((2.262, 0.025), (1.833, 0.05), (-1.833, 0.95)):
        assert track.figures(runs, 0.5 - t * error)["p"] == pytest.approx(p, abs=1e-4)
    # Equal figures show nothing of chance.
    assert track.figures(runs[:1] * 10, 0.1)["p"] == 1


@pytest.fixture
def real(small, monkeypatch):
    """The track itself."""
    path = ROOT / f"experiments/study/presets/{track.PRESETS[0]}.toml"
    monkeypatch.setitem(presets.FILES, track.PRESETS[0], path)


@pytest.mark.parametrize("path", ENTRIES, ids=lambda path: path.stem)
def test_a_committed_entry_is_that_of_its_log(path, real):
    log = json.loads(path.with_suffix(".json").read_text())
    assert [*track.contradictions(track.read_entry(path), log)] == []
    assert log["commit"] and not log["commit"].endswith("dirty")


def test_table_of_the_track_is_what_its_logs_say():
    assert len([*page.ENTRIES.rglob("*.json")]) == len(ENTRIES) >= 10
    assert page.filled(text := page.PAGE.read_text()) == text, "make table"


@pytest.mark.long
def test_a_record_holds():
    words = "-m experiments.track verify docs/track/muloco_muon_48.py --first-seed 3100"
    # As a user compiles, and as the log was made.
    ended = ran([sys.executable, *words.split()], timeout=600, XLA_FLAGS=None)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith("\nholds\n")
