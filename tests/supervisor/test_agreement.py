"""Lines about processes that differ, or that jax reports as missing or lost."""

import os

import pytest

from experiments.launch.cluster import inspection
from experiments.launch.joining import agreement
from experiments.launch.joining.aborts import line_of
from experiments.launch.joining.agreement import Hello


def hello(process, facts=None, host=("vm", "boot", "net")):
    return Hello(process, list(host), facts or {}, "runs/1")


@pytest.mark.parametrize(
    "facts, expected",
    [
        (
            ({"--seed": 0}, {"--seed": 1}),
            "process 1 has --seed 1, but process 0 has --seed 0",
        ),
        (
            ({"--lr": None, "jax": "0.10.2"}, {"--lr": 0.5, "jax": "0.10.1"}),
            "process 1 has --lr 0.5, jax 0.10.1, but process 0 has no --lr, jax 0.10.2",
        ),
        (
            ({f"--{c}": 0 for c in "abcde"}, {f"--{c}": 1 for c in "abcde"}),
            "process 1 has --a 1, --b 1, --c 1, "
            "but process 0 has --a 0, --b 0, --c 0 (2 more differ)",
        ),
        (
            ({"--x": 100 * "x" + "a"}, {"--x": 100 * "x" + "b"}),
            f"process 1 has --x …{20 * 'x'}b, but process 0 has --x …{20 * 'x'}a",
        ),
        (({"--seed": 0}, {"--seed": 0}), None),
    ],
    ids=["one", "two", "many", "long", "none"],
)
def test_what_differs_is_named(facts, expected):
    found = agreement.difference([hello(i, each) for i, each in enumerate(facts)])
    assert found == expected


def test_processes_that_differ_alike_are_named_together():
    seeds = [0, 1, 0, 1, 2]
    hellos = [hello(i, {"--seed": seed}) for i, seed in enumerate(seeds)]
    line = "processes 1 and 3 have --seed 1, but process 0 has --seed 0"
    assert agreement.difference(hellos) == line


def test_networks_of_one_machine_are_hosts_of_their_own():
    a, b = ("vm", "boot", "net1"), ("vm", "boot", "net2")
    hellos = [hello(i, host=host) for i, host in enumerate((a, b, a, a))]
    assert agreement.places(hellos) == (2, [(0, 3), (0, 1), (1, 3), (2, 3)])
    assert len(inspection.host()) == 3
    assert os.uname().nodename == inspection.host()[0]


# As jax 0.10 words them.
NOISE = "F1122 09:25:34.19 13320 client.h:80] Terminating process. absl::Status: "
MISSING = "DEADLINE_EXCEEDED: Barrier timed out. Some timed out task names:\n1\n2\n\n"
SILENT = "UNAVAILABLE: unhealthy (stopped sending heartbeats):\n1\nThe tasks crashed."
AGAIN = "ABORTED: 1 unexpectedly tried to connect with a different incarnation."
STRANGE = "INVALID_ARGUMENT: Unexpected task registered with task=7\n"
OTHER = "DEADLINE_EXCEEDED\n\nRPC: /xla.coordination.CoordinationService/RegisterTask"
NOBODY = "UNAVAILABLE: Failed to send RPC to coordination service. Either the leader"


@pytest.mark.parametrize(
    "status, expected",
    [
        (MISSING, "process 0 at a:9 waited 60 s for processes 1 and 2 of 3"),
        (SILENT, "process 1 gave no sign of life for 20 s"),
        (AGAIN, "process 1 was started twice"),
        (STRANGE, "process 7 is none of those that process 0 waits for"),
        (
            OTHER,
            "what listens at a:9 does not take this process: it is no process 0 of "
            "this program, or has one of this number already",
        ),
        (NOBODY, "process 0 at a:9 is gone"),
        ("INTERNAL: no idea\nat all", "jax ends this process: INTERNAL: no idea"),
    ],
    ids=["missing", "silent", "again", "strange", "other", "nobody", "unknown"],
)
def test_abort_of_jax_becomes_a_line(status, expected):
    assert line_of(NOISE + status, "a:9", 3, 60.0, 20.0) == expected


def test_abort_that_is_not_jaxs_is_none_of_its_lines():
    assert line_of("free(): invalid pointer\n", "a:9", 3, 60.0, 20.0) is None
