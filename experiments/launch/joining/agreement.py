"""Checks that the processes of a run belong together, and finds which share a host."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.launch.supervisor.group import numbered, processes

SHOWN = 3  # differences that are named


class Hello(NamedTuple):
    """The introduction of a process.

    Attributes:
        process: its number.
        host: name, boot and network of its machine, which together identify it.
        facts: the values on which all processes must agree, by the name that the user
            knows, such as "--seed" or "jax"; JSON values, None where there is none.
        out: the folder for the run's files, which process 0 chooses for those that say
            none.
    """

    process: int
    host: list[str]
    facts: dict[str, Any]
    out: str


def places(hellos: Sequence[Hello]) -> tuple[int, list[tuple[int, int]]]:
    """Counts the hosts, and numbers the processes of each.

    Returns:
        The number of hosts; and for each process, in their order, its number on its
        host and the number of processes on that host.
    """
    # Groups of `hierarchical` follow the hosts, not the processes: else two processes
    # on one host would give other numbers than one.
    hosts = [tuple(hello.host) for hello in hellos]
    each = [(local, sharing) for _, local, sharing in numbered(hosts)]
    return len(set(hosts)), each


def difference(hellos: Sequence[Hello]) -> str | None:
    """Reports the facts in which processes differ from process 0, in one line.

    Args:
        hellos: of all processes, in their order.

    Returns:
        The line; None if all agree.
    """
    first = hellos[0]
    others = [hello.facts for hello in hellos if hello.facts != first.facts]
    if not others:
        return None
    ids = [hello.process for hello in hellos if hello.facts == others[0]]
    both = others[0], first.facts
    names = [x for x in {**both[1], **both[0]} if both[0].get(x) != both[1].get(x)]
    theirs, ours = (
        ", ".join(_shown(name, facts.get(name)) for name in names[:SHOWN])
        for facts in both
    )
    have = "have" if len(ids) > 1 else "has"
    more = f" ({len(names) - SHOWN} more differ)" if len(names) > SHOWN else ""
    return f"{processes(ids)} {have} {theirs}, but process 0 has {ours}{more}"


def _shown(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"no {name}" if value is None else f"{name} {text}"
