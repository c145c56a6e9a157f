"""Lines about processes that differ."""

import os

import pytest

from experiments.processes import network
from experiments.processes.join import Hello, difference, place_on_host


def hello(facts):
    return Hello(["vm", "boot", "net"], facts, "runs/1")


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
        (({"--seed": 0}, {"--seed": 0}), None),
    ],
    ids=["one", "two", "many", "none"],
)
def test_what_differs_is_named(facts, expected):
    assert difference([hello(process_facts) for process_facts in facts]) == expected


def test_processes_that_differ_alike_are_named_together():
    hellos = [hello({"--seed": seed}) for seed in [0, 1, 0, 1, 2]]
    line = "processes 1 and 3 have --seed 1, but process 0 has --seed 0"
    assert difference(hellos) == line


def test_networks_of_one_machine_are_hosts_of_their_own():
    a = ("vm", "boot", "net1")
    b = ("vm", "boot", "net2")
    places = [place_on_host([a, b, a, a], process) for process in range(4)]
    assert places == [(0, 3), (0, 1), (1, 3), (2, 3)]
    assert len(network.host()) == 3
    assert os.uname().nodename == network.host()[0]
