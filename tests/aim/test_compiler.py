"""Programs as their compilers hand them out."""

from pathlib import Path

import jax
import pytest

from experiments.aim import compile

OUT_OF_MEMORY = """RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on \
HBM, the total memory required for HLO temporaries (48.74G) exceeds available HBM \
(15.75G). HLO module: jit_on_block.
See https://openxla.org/xla/errors/error_1000 for more details."""


def test_memory_needed_is_read_from_the_tpu_compiler():
    memory_bytes = compile.memory_needed(RuntimeError(OUT_OF_MEMORY))
    assert memory_bytes == int(48.74 * 2**30)
    assert compile.memory_needed(RuntimeError("INVALID_ARGUMENT: (1G) (2G)")) is None


class FakeProgram:
    """A program that jaxlib cannot read, unless its compiler wrote it down."""

    def __init__(self, error):
        self.error = error
        self.compilations = 0

    def compile(self, compiler_options=None):
        self.compilations += 1
        if compiler_options:
            folder = Path(compiler_options["xla_dump_to"])
            (folder / "module_0000.f.after_optimizations.txt").write_text("HloModule f")
            (folder / "module_0000.f.before_optimizations.txt").write_text("not this")
        return self

    def as_text(self):
        raise jax.errors.JaxRuntimeError(self.error)


def test_program_that_jaxlib_cannot_read_is_written_by_its_compiler():
    program = FakeProgram("INTERNAL: RET_CHECK failure: async-update")
    assert compile.compile_lowered(program)[1] == "HloModule f"
    assert program.compilations == 2


def test_other_errors_stay():
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
        compile.compile_lowered(FakeProgram("UNAVAILABLE: gone"))


def test_text_is_that_of_the_program():
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    assert compile.compile_lowered(lowered)[1].startswith("HloModule")
