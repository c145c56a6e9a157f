"""Refusals of studies: one table of calls, and what the line of each must say.

A new row is a call, which gets a folder that it must not make, and the words. Bad flags
of the commands have rows in tests/command/test_bad_requests.py.
"""

import math
import shlex
from functools import partial

import dask.config
import pytest
from support.dask_cluster import certificates

from experiments.command.errors import BadRequest
from experiments.study import config, statistics, study
from experiments.study.jobs import TLS, reach
from syncalgos import network

NETWORKS = {
    "": ["network '': '' is neither a preset nor a number", *network.PRESETS],
    "100": ["100 has no unit", "such as '100Mbit/s, 20ms'"],
    "1,5Mbit/s": ["1 has no unit"],
    "100Mbps": ["unknown unit 'Mbps'", "did you mean 'Mbit/s'?"],
    "1Mbit/s, -2ms": ["-2ms must be at least 0"],
    "1e999Mbit/s": ["must be at least 0 and finite"],
    "1e300Tbit/s": ["the bandwidth must be above 0 and finite"],
    "0Mbit/s, 1ms": ["the bandwidth must be above 0"],
    "20ms": ["no bandwidth"],
    "gloo": ["'gloo' is neither a preset nor a number"],
    "1Mbit/s, 2Mbit/s": ["two bandwidths"],
    "1Mbit/s, 0s, 2ms": ["two latencies"],
    "nan": ["'nan' is neither a preset"],
    "dls": ["did you mean 'dsl'?"],
    "10gb": ["unknown unit 'gb'", "did you mean '10gbe'?"],
}
STUDIES = {
    "--target 5": ["--target 5", "at most 1"],
    "--measure test_accuracy --target 1.5": ["--target 1.5", "at most 1"],
    "--measure test_acuracy": ["--measure", "did you mean 'test_accuracy'"],
    "--task support.tiny_tasks:poisoned --measure test_accuracy": ["test_loss"],
    "--algos bmuf --sweep=workers=1,3 --batch-size=64": ["divide over 3 workers"],
    "--jobs 2 --scheduler tcp://127.0.0.1:1": ["--jobs", "--scheduler"],
    "--list --jobs 2": ["--list", "--jobs"],
    "--algos sync_sgd --lr 0.1 --seeds 20001": [
        "would make 20,001 runs, more than 20,000",
        "give fewer values to --tune or --sweep, or fewer --seeds",
    ],
    "--worker-batch 4 --tune=workers=2,4": [
        "cannot be used while --workers is tuned: use --batch-size, or --sweep",
    ],
    "--sweep=lr=0.1,0.2 --tune=lr=0.1,0.3": [
        "--lr can be swept or tuned once only: name it in one --sweep or --tune",
    ],
    "--sweep=lr=0.1:1:log:3+2": ["are for --tune: leave out +MORE"],
    "--tune=lr=0.1:1:log:3+2x0": ["+MORE behind it", "xSEEDS behind that"],
    "--tune=lr=0.1:1:log:3x5": ["+MORE behind it", "xSEEDS behind that"],
    "--tune=lr=0.1:1:log:3+2x5 --tune-seeds=5": [
        "--tune lr: x5 needs more seeds near the best than --tune-seeds 5"
    ],
    "--scheduler nowhere": ["a scheduler file", "'nowhere'"],
    "--scheduler tls://127.0.0.1:1": ["tls:// needs certificates"],
}
NOT_FINITE = "one or more finite values, got"


def compare(command, out):
    """Begins a study."""
    argv = [*shlex.split(command), f"--out={out}"]
    study.run_study(
        config.read_command_line(argv), argv, lambda: pytest.fail("a run was begun")
    )


def ignore_folder(function, *arguments):
    """A function that takes no folder."""
    return lambda out: function(*arguments)


REFUSED = [
    *((ignore_folder(network.parse, text), words) for text, words in NETWORKS.items()),
    *((partial(compare, command), words) for command, words in STUDIES.items()),
    (ignore_folder(statistics.spread, []), [NOT_FINITE]),
    (ignore_folder(statistics.spread, [1.0, math.nan]), [NOT_FINITE]),
    (ignore_folder(statistics.find_difference, {0: math.inf}, {0: 1.0}), ["finite"]),
]


def test_certificates_that_cannot_be_used_are_named(tmp_path):
    pytest.importorskip("distributed")  # its defaults come before other settings
    for folder in (tmp_path / "foreign", tmp_path):
        folder.mkdir(exist_ok=True)
        certificate_settings = certificates(folder)
    for number, path, words in (
        (0, "nowhere.pem", "CLIENT__CERT .*nowhere.pem: No such file"),
        (1, "nowhere.pem", "CLIENT__KEY .*nowhere.pem: No such file"),
        (2, "nowhere.pem", "CA_FILE .*nowhere.pem: No such file"),
        (1, "foreign/key.pem", "CLIENT__KEY .*key.pem is not the key .*/cert.pem"),
        (1, "cert.pem", "CLIENT__KEY .*cert.pem is not the key .*: set .*KEY to"),
        (2, "key.pem", "CA_FILE .*key.pem is no certificate: .*: set .*CA_FILE to"),
    ):
        names = ("CLIENT__CERT", "CLIENT__KEY", "CA_FILE")
        files = [certificate_settings[f"{TLS}{name}"] for name in names]
        files[number] = str(tmp_path / path)
        settings = (f"comm.tls.{x}" for x in ("client.cert", "client.key", "ca-file"))
        tls = {f"distributed.{x}": y for x, y in zip(settings, files, strict=True)}
        with dask.config.set(tls), pytest.raises(BadRequest, match=words) as refused:
            reach("tls://127.0.0.1:1", 1.0)
        assert refused.value.code == 2


def test_a_study_does_not_mix_runs_on_a_file_with_runs_on_a_changed_one(tmp_path):
    path = tmp_path / "t.csv"
    rows = "x,y\n" + "1,a\n2,b\n" * 20
    path.write_text(rows)
    words = f"--algos sync_sgd --task table --file {path} --batch-size 8 --seeds 1"
    study_config = config.read_command_line(
        [*shlex.split(words), f"--out={tmp_path / 'study'}"]
    )
    for _ in range(2):
        with study.open_study(study_config) as (plan, _):
            assert plan.missing == 1
    path.write_text(rows.replace("2,b", "3,b"))
    with pytest.raises(BadRequest, match="holds a study with other data"):
        study.open_study(study_config).__enter__()


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_cannot_be_is_refused_in_a_line_and_leaves_nothing(call, words, tmp_path):
    with pytest.raises((ValueError, BadRequest)) as refused:
        call(tmp_path / "study")
    line = str(refused.value)
    assert "\n" not in line
    assert [text for text in words if text not in line] == []
    assert not (tmp_path / "study").exists()
