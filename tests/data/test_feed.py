"""Training data that stays on the host: the same batches, read ahead by threads."""

import json
import os
import re
import signal
import threading
import time

import numpy as np
import pytest
from support.commands import execute, in_background
from support.resumed_runs import OURS
from support.tiny_tasks import BATCH, EXAMPLES

from experiments import run
from experiments.command.errors import BadRequest
from experiments.data import feeding, sampling
from experiments.training.loop import dispatches

SECONDS = 30  # after which a thread that should have ended counts as hanging


class Squares:
    """A source that notes what was read of it, and by whom."""

    def __init__(self, bad=None):
        self.bad = bad
        self.read = []
        self.threads = set()

    def __len__(self):
        return 40

    def __getitem__(self, number):
        self.read.append(number)
        self.threads.add(threading.get_ident())
        if number == self.bad:
            raise OSError("the disk is on fire")
        return {"x": np.full((2, 3), number**2), "y": np.float32(-number)}


ARRAYS = {
    "x": np.repeat(np.arange(40) ** 2, 6).reshape(40, 2, 3),
    "y": -np.arange(40, dtype=np.float32),
}


def rows(start, steps):
    return sampling.rows(0, start, steps, 8, 40)


@pytest.fixture(params=[Squares, lambda: ARRAYS], ids=["source", "arrays"])
def train(request):
    return request.param()


@pytest.mark.parametrize("shape", [(8,), (3, 8), (1, 4, 2)])
def test_gathered_examples_are_those_that_rows_name(train, shape):
    wanted = np.random.default_rng(0).integers(0, 40, shape)
    examples = feeding.gather(train, wanted)
    assert examples.keys() == ARRAYS.keys()
    for name, x in ARRAYS.items():
        np.testing.assert_array_equal(examples[name], x[wanted])
        assert examples[name].dtype == x.dtype


@pytest.mark.parametrize("dispatch_steps", [1, 4, 50])
def test_dispatches_come_in_their_order_each_once(train, dispatch_steps):
    parts = list(dispatches([20, 40, 50], dispatch_steps))
    batches = list(feeding.read_ahead(train, parts, rows))
    assert [len(batch["y"]) for batch in batches] == [steps for _, steps in parts]
    all_rows = rows(0, 50)
    for name, x in ARRAYS.items():
        np.testing.assert_array_equal(
            np.concatenate([batch[name] for batch in batches]), x[all_rows]
        )


def test_reading_goes_on_in_other_threads_but_not_far():
    """A run of a million steps must not fill the memory."""
    source = Squares()
    ahead = feeding.read_ahead(source, [(step, 1) for step in range(1000)], rows)
    for num_taken in (1, 2, 3):
        next(ahead)
        time.sleep(0.2)  # time enough to read hundreds
        assert (
            num_taken * 8
            < len(source.read)
            <= 8 * (num_taken + feeding.AHEAD + feeding.THREADS)
        )
    assert threading.get_ident() not in source.threads


def test_what_a_source_raises_comes_out_where_it_is_read():
    source = Squares(bad=int(rows(3, 1)[0, 5]))
    ahead = feeding.read_ahead(source, [(step, 1) for step in range(5)], rows)
    assert source.bad not in rows(0, 5)[:3]
    caught = []
    taken_batches = []

    def take():
        try:
            taken_batches.extend(ahead)
        except BadRequest as error:
            caught.append(error)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive()
    message_start = (
        f"training example {source.bad}: OSError: the disk is on fire (test_feed.py:"
    )
    assert str(caught[0]).startswith(message_start)
    assert len(taken_batches) <= 3


class Odd(Squares):
    """A source whose example 7 is unlike the others."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def __getitem__(self, number):
        example = super().__getitem__(number)
        return self.change(example) if number == 7 else example


def missing(example):
    return open("/nowhere/7.png")


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (lambda x: {**x, "x": x["x"][:1]}, 2, "7 has shapes {'x': (1, 3), 'y': ()}, b"),
        (lambda x: {"x": x["x"]}, 2, "7 has shapes {'x': (2, 3)}, but example 3 has"),
        (lambda x: None, 2, "example 7 must be a dict of arrays, got None"),
        (lambda x: [1.0], 2, "example 7 must be a dict of arrays, got [1.0]"),
        (lambda x: {**x, "y": "cat"}, 2, "example 7 must be a dict of arrays, got {"),
        (lambda x: x["z"], 2, "7: KeyError: 'z' (test_feed.py:"),
        (missing, 2, "7: /nowhere/7.png: No such file or d"),
        (lambda x: os.read(-1, 1), 75, "7: OSError: [Errno 9] Bad file descriptor"),
    ],
)
def test_an_odd_example_is_named(change, code, message):
    """A code of 75 asks to go on later, as a disk may be back."""
    with pytest.raises(BadRequest, match=re.escape(message)) as raised:
        feeding.gather(Odd(change), np.array([[7, 3, 12]]))
    assert raised.value.code == code
    held_out = feeding.gather(
        feeding.Part(Odd(change), np.array([3, 12])), np.array([0, 1])
    )
    assert len(held_out["x"]) == 2


@pytest.fixture
def run_summary(tmp_path):
    """Returns run(flags) -> summary, by the command line inside this process."""

    def run_summary(words):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        words = f"{words} --workers 4 --backend vmap --out {out}"
        assert run.main(words.split()) == 0
        return json.loads((out / "summary.json").read_text())

    return run_summary


@pytest.mark.slow
def test_host_device_and_a_source_feed_the_same_bits(run_summary, monkeypatch):
    words = "--task support.tiny_tasks:read --dispatch-steps 5 --steps 24"
    expected = run_summary(f"{words} --kind arrays --eval-every 12")
    summaries = [run_summary(f"{words} --kind source")]
    monkeypatch.setattr(feeding, "MOST_ON_DEVICE", 0)
    summaries.append(
        run_summary(f"{words} --kind arrays --eval-every 4 --dispatch-steps 3")
    )
    for summary in summaries:
        assert summary["params_sha256"] == expected["params_sha256"]
        assert summary["test_loss"] == expected["test_loss"]


@pytest.mark.slow
def test_run_whose_source_raises_keeps_what_was_trained(tmp_path):
    bad = int(sampling.rows(0, 3, 1, BATCH, EXAMPLES)[0, 0])
    assert bad not in sampling.rows(0, 0, 3, BATCH, EXAMPLES)
    words = f"--task support.tiny_tasks:read --bad {bad} --workers 2 --steps 8"
    environ = {"PYTHONPATH": OURS}
    ended = execute(words, tmp_path / "out", **environ, ON_FIRE="1").with_code(75)
    error_line = ended.stderr.splitlines()[-1]
    assert error_line.startswith(
        f"error: training example {bad}: OSError: the disk is on f"
    )
    assert error_line.endswith("--resume continues after step 3")
    ended = execute(f"{words} --resume", tmp_path / "out", **environ).with_code(0)
    assert "resuming from the checkpoint of step 3" in ended.stderr


@pytest.mark.long
def test_ctrl_c_stops_a_host_fed_run_with_complete_files(tmp_path):
    words = (
        "--task support.tiny_tasks:read --workers 2 --steps 1000000 --dispatch-steps 16"
    )
    words += " --eval-every 16"
    with in_background(words, tmp_path / "out", PYTHONPATH=OURS) as (process, wait):
        wait("step      16/1000000")
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)  # no process is left
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert 16 <= summary["steps"] < 1_000_000 and summary["stopped"]
