"""Trackers, by what the real libraries stored; those not installed are skipped."""

import json
import struct
from importlib import import_module

import pytest
from support.resumed_runs import run, signal_before

from experiments.api import RunConfig, train
from experiments.command.errors import BadRequest, Unwritten
from experiments.one_run import Folder
from experiments.training.config import parse
from experiments.training.prepare import prepare
from experiments.training.trackers import KINDS, Tracked

WORDS = (
    "--task support.tiny_tasks:drawing --workers 4 --steps 24 "
    "--eval-every 8 --algo diloco"
)
TINY = RunConfig(task="support.tiny_tasks:drawing", workers=4, steps=16, eval_every=8)

pytestmark = pytest.mark.filterwarnings("default")  # the libraries have some


@pytest.fixture(scope="module", autouse=True)
def local():
    """Nothing leaves this machine, or comes into the user's own folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        yield


def framed(path):
    """The messages of a TFRecord file: length, its checksum, data, its checksum."""
    content = path.read_bytes()
    offset = 0
    while offset < len(content):
        (length,) = struct.unpack_from("<Q", content, offset)
        yield content[offset + 12 : offset + 12 + length]
        offset += 12 + length + 4


def in_tensorboard(folder):
    """Curves of an event file, {name: {step: value}}, and its texts by name."""
    from tensorboardX.proto import event_pb2

    curves = {}
    texts = {}
    (path,) = folder.glob("events.out.tfevents.*")
    for record in framed(path):
        event = event_pb2.Event.FromString(record)  # pyright: ignore
        for value in event.summary.value:
            if value.HasField("tensor"):
                text = value.tensor.string_val[0].decode()
                texts[value.tag.removesuffix("/text_summary")] = text
            else:
                points = curves.setdefault(value.tag, {})
                assert event.step not in points or value.tag.startswith("by_bytes/")
                points[event.step] = value.simple_value
    return curves, texts


def in_wandb(folder):
    """The offline runs of a folder: curves by id, and the config of each start."""
    messages = import_module("wandb.proto.wandb_internal_pb2")

    curves = {}
    starts = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        run_curves = curves.setdefault(path.stem.removeprefix("run-"), {})
        for record in logged(path):
            message = messages.Record.FromString(record)
            if message.HasField("run"):
                items = message.run.config.update
                starts.append({x.key: json.loads(x.value_json) for x in items})
            items = message.history.item
            line = {x.nested_key[0]: json.loads(x.value_json) for x in items}
            for name, value in line.items():
                run_curves.setdefault(name, {})[line["_step"]] = value
    return curves, starts


def logged(path):
    """The records of a log in LevelDB's form: pieces in blocks of 32 kB."""
    content = path.read_bytes()
    offset = 7
    record = b""
    while offset + 7 <= len(content):
        block_left = -offset % 2**15
        if block_left and block_left < 7:
            offset += block_left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, offset)
        record += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # all of a record, or its last piece
            yield record
            record = b""


def curve(lines, name, x_key="step"):
    return {line[x_key]: line[name] for line in lines}


def resumed(name, out):
    """A run that was stopped at its 16th step and went on, with a tracker."""
    needs(name)
    words = f"{WORDS} --dispatch-steps 8 --track {name} --checkpoint-every 8"
    stopped_run = run(words, out, signal_before(3))
    assert stopped_run.code == 75 and len(stopped_run.lines) == 2, stopped_run.stderr
    resumed_run = run(f"{words} --resume", out)
    assert resumed_run.code == 0 and len(resumed_run.lines) == 3, resumed_run.stderr
    for ended in (stopped_run, resumed_run):
        assert "no longer used" not in ended.stderr
        assert "wandb:" not in ended.stdout  # as its lines begin
    return resumed_run


def needs(name):
    module = KINDS[name].module
    pytest.importorskip(module, reason=f"{module} is not installed")


@pytest.mark.slow
def test_tensorboard_has_a_resumed_run_by_step_and_by_bytes(tmp_path):
    ended = resumed("tensorboard", tmp_path / "out")
    curves, texts = in_tensorboard(ended.out / "tensorboard")
    lines = ended.lines
    for name in ("train_loss", "test_loss", "divergence"):
        assert curves[name] == pytest.approx(curve(lines, name))
    by_bytes = curve(lines, "test_loss", "bytes_per_worker")
    assert curves["by_bytes/test_loss"] == pytest.approx(by_bytes)
    assert '"algo": "diloco"' in texts["config"]
    assert ended.summary["params_sha256"] in texts["summary"]


def test_tensorboard_leaves_event_files_of_others(tmp_path):
    needs("tensorboard")
    other = tmp_path / "tensorboard" / "events.out.tfevents.1.host"
    other.parent.mkdir()
    other.touch()
    for _ in range(2):
        tracker = KINDS["tensorboard"]()
        tracker.start(Tracked("run", "0", {}, tmp_path))
        tracker.finish({})
    assert other.exists() and len([*other.parent.iterdir()]) == 2


@pytest.mark.slow
def test_wandb_has_one_run_with_the_curves_of_both_starts(tmp_path):
    ended = resumed("wandb", tmp_path / "out")
    curves, starts = in_wandb(ended.out)
    (run_curves,) = curves.values()
    for name in ("test_loss", "bytes_per_worker"):  # any of them may be the x axis
        assert run_curves[name] == curve(ended.lines, name)
    assert [config["algo"] for config in starts] == ["diloco", "diloco"]


class Mine:
    """A tracker of one's own, which raises in one of its functions."""

    def __init__(self, raises=""):
        self.raises = raises
        self.calls = []

    def start(self, run):
        self._tell("start", run)

    def log(self, line):
        self._tell("log", line)

    def finish(self, summary):
        self._tell("finish", summary)

    def _tell(self, function, value):
        self.calls.append((function, value))
        if function == self.raises:
            raise ConnectionError("no network\nhere")


@pytest.mark.slow
def test_a_tracker_that_fails_is_left_out_and_all_else_goes_on(capsys):
    failing = Mine("log")
    mine = Mine()
    with pytest.raises(Unwritten, match="Mine failed") as raised:
        train(TINY, track=[failing, mine])
    trained = raised.value.result
    names = ["start", "log", "log", "finish"]
    assert [name for name, _ in mine.calls] == names
    (_, run), *lines, (_, summary) = mine.calls
    assert [line for _, line in lines] == trained.metrics
    assert summary == trained.summary and run.config["workers"] == 4
    assert [name for name, _ in failing.calls] == names[:2]
    assert trained.summary["steps"] == TINY.steps
    [error_line] = [x for x in capsys.readouterr().err.splitlines() if "Mine" in x]
    assert error_line.startswith("--track Mine failed, and is no longer used")
    assert error_line.endswith("ConnectionError: no network here")


def test_only_the_first_of_several_processes_tracks():
    prepared_run = prepare(TINY)
    group = prepared_run.group._replace(process=1)
    mine = Mine()
    Folder(prepared_run._replace(group=group), None, 0.0).track([mine]).finish({})
    assert mine.calls == []


@pytest.mark.parametrize("name", KINDS)
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadRequest, match=rf"--track {name} .*\.\[trackers\]"):
        parse([f"--track={name}"])
