"""Runs a program, and prints how it waits for its programs of several devices.

    python tests/support/calls_in_flight.py PROGRAM

The last line is "N calls, M in flight": N is how often programs that `jax.jit` compiled
for several devices were called, and M how often one was called again before
`jax.block_until_ready`. Such calls deadlock on CPU devices, though seldom.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.core import Tracer

compile_function = jax.jit
wait = jax.block_until_ready
number_of_calls = 0
calls_in_flight = 0
unawaited_programs: set[Any] = set()


def watched_jit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compiles a function by jax.jit; the result counts its calls."""
    program = compile_function(function, **options)

    def call(*args: Any) -> Any:
        global number_of_calls, calls_in_flight
        result = program(*args)
        leaves = jax.tree.leaves(result)
        if not any(spans_devices(leaf) for leaf in leaves):
            return result
        number_of_calls += 1
        if program in unawaited_programs:
            calls_in_flight += 1
        unawaited_programs.add(program)
        return result

    return call


def spans_devices(leaf: Any) -> bool:
    """Whether an array lies on several devices; not the tracer of another program."""
    return not isinstance(leaf, Tracer) and len(leaf.devices()) > 1


def watched_wait(values: Any) -> Any:
    """Waits as jax.block_until_ready does; no program is in flight then."""
    unawaited_programs.clear()
    return wait(values)


if __name__ == "__main__":
    jax.jit = watched_jit
    jax.block_until_ready = watched_wait
    program_text = Path(sys.argv[1]).read_text()
    exec(compile(program_text, sys.argv[1], "exec"), {"__name__": "__main__"})
    print(f"{number_of_calls} calls, {calls_in_flight} in flight")
