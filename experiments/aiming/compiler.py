"""Calls the compiler of a target, and gets its program."""

import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple


class Compiled(NamedTuple):
    """A compiled program.

    Attributes:
        program: a jax.stages.Compiled, used for its memory analysis.
        text: its HLO text.
    """

    program: Any
    text: str


def compiled(lowered: Any) -> Compiled:
    """Compiles a jax.stages.Lowered.

    Raises:
        jax.errors.JaxRuntimeError: the compiler fails; see `memory_needed`.
    """
    import jax

    program = lowered.compile()
    try:
        return Compiled(program, program.as_text())
    except jax.errors.JaxRuntimeError as error:
        # A libtpu newer than jaxlib uses instructions that jaxlib cannot read, such as
        # gathers on the sparse cores of v5p; libtpu can dump them itself.
        if "RET_CHECK" not in str(error):
            raise
        return _dumped(lowered)


def _dumped(lowered: Any) -> Compiled:
    """Compiles once more, and has the compiler write its program to a file."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        program = lowered.compile(compiler_options=options)
        [file] = Path(folder).glob("*.after_optimizations.txt")
        return Compiled(program, file.read_text("utf-8"))


def memory_needed(error: BaseException) -> int | None:
    """Returns the bytes that a program needs on a chip; None if the error has none.

    The TPU compiler refuses programs that do not fit; the GPU compiler compiles them.
    """
    amounts = re.findall(r"\(([\d.]+)([KMGT])\)", str(error).partition("HLO module")[0])
    if "RESOURCE_EXHAUSTED" not in str(error) or len(amounts) != 2:
        return None
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    number, unit = amounts[0]  # the second one is what the chip has
    return int(float(number) * units[unit])
