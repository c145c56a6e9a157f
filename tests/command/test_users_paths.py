"""Paths of a user's that lead nowhere, to a pipe, to a device or to a folder."""

import os

import pytest
from support.command_answers import answered

from experiments import files

LONG = "n" * 300  # file systems allow 255
# What a user may name where a file or a folder belongs, by what is there.
PATHS = {
    "name that is too long": LONG,
    "name below one that is too long": f"{LONG}/x",
    "link to itself": "loop",
    "pipe": "pipe",
    "device without an end": "zeros",
    "folder": "folder",
    "name below a file": "file/x",
    "name in a closed folder": "/proc/nothing/x",
}
READ = {
    "run --init-from {}": list(PATHS),
    "run --task table --file {}.csv": list(PATHS),
    "run --task table --file {}.npz": list(PATHS),
    "run --task text --text {} --test-text {}": list(PATHS),
    "run --resume-center {}": list(PATHS),
    "compare --scheduler {}": list(PATHS),
    "aim --target cpu:2 --reuse {}": list(PATHS),
}
WRITTEN = {
    "run --out {}": [x for x in PATHS if x != "folder"],
    "compare --out {}": [x for x in PATHS if x != "folder"],
    # A pipe and a device may be written to.
    "aim --target cpu:2 --page {}": [
        x for x in PATHS if x not in ("pipe", "device without an end")
    ],
    "aim --target cpu:2 --json {}": [
        x for x in PATHS if x not in ("pipe", "device without an end")
    ],
}
NAMES = {
    "run --algo {}": list(PATHS),
    "run --algo {}:make": list(PATHS),
    "run --algo {}.py:make": list(PATHS),
    "run --task {}": list(PATHS),
    "run --task {}:make": list(PATHS),
    "compare --algos {}": list(PATHS),
    "compare --preset {}": list(PATHS),
}
COMMANDS = []
for commands in (READ, WRITTEN, NAMES):
    for command, names in commands.items():
        COMMANDS += [command.replace("{}", PATHS[name]) for name in names]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The answers to all commands, in a folder that has such paths."""
    folder = tmp_path_factory.mktemp("paths")
    for end in ("", ".csv", ".npz", ".py"):
        (folder / f"loop{end}").symlink_to(f"loop{end}")
        os.mkfifo(folder / f"pipe{end}")
        (folder / f"zeros{end}").symlink_to("/dev/zero")
        (folder / f"folder{end}").mkdir()
    (folder / "file").write_text("x")
    old_paths = sorted(folder.rglob("*"))
    by_command = dict(zip(COMMANDS, answered(COMMANDS, folder), strict=True))
    assert sorted(folder.rglob("*")) == old_paths
    return by_command


@pytest.mark.parametrize("command", COMMANDS, ids=lambda x: x.replace(LONG, "long"))
def test_a_path_that_cannot_be_used_is_refused_in_a_line(command, answers):
    code, out, err, _ = answers[command]
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    assert line.startswith("error: ")


def test_a_regular_file_may_be_bounded(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(b"12345")
    assert files.read_bytes(path, 5) == b"12345"
    with pytest.raises(files.Damaged, match="it has 5 bytes, and may have 4"):
        files.read_bytes(path, 4)
