"""A trainer's programs: compiled once for each shape of their arguments, and called."""

import time
from typing import Any

import jax

from syncalgos.collectives import PyTree
from syncalgos.engine import arguments as inputs
from syncalgos.engine.backends import debugging, lower
from syncalgos.engine.lanes import selection
from syncalgos.engine.lanes.execution import Agree, Form, Together
from syncalgos.engine.lanes.replication import Equal
from syncalgos.engine.layout import Layout
from syncalgos.engine.worker import Worker


class Programs:
    """Those of a worker, laid over all of them.

    Attributes:
        compiled: by program and by what it was compiled for.
        seconds: spent so far on tracing and compiling.
        temp_bytes: see `DataParallel`.
        form: of the last `Worker.run` that was compiled; None before it.
    """

    def __init__(self, worker: Worker, layout: Layout, lane_form: str | None):
        self._worker, self._layout, self._lane_form = worker, layout, lane_form
        self._equal = Equal(worker, layout)
        self.compiled: dict[Any, Any] = {}
        self.seconds = 0.0
        self.temp_bytes: int | None = None
        self.form: Form | None = None

    def put_back(self, own: PyTree, held: PyTree) -> None:
        """Takes note of a state that came from the host, where it is `held`."""
        if self._shares and self._layout.processes == 1:  # several would have to agree
            self._equal.note_if_equal(own, held)

    @property
    def _shares(self) -> bool:
        """Whether lanes of a device may hold what is equal once."""
        several = self._layout.lanes > 1
        return several and self._worker.sharded is None and not debugging()

    def of_state(
        self, program: Any, own: PyTree, shared: PyTree = (), batches: PyTree = ()
    ) -> tuple[PyTree, PyTree]:
        """`call`, for (replica, sync); what all lanes share is held once a device."""
        equal = None
        if self._shares:
            equal = self._equal.of(own, lambda equal: self.call(Agree(equal), own)[1])
        return self.call(program, own, shared, batches, equal)

    def call(
        self,
        program: Any,
        own: PyTree,
        shared: PyTree = (),
        batches: PyTree = (),
        equal: tuple[bool, ...] | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Runs a program on all workers: see `syncalgos.engine.backends.spread`.

        Args:
            program: a method of Worker, or a form.
            own: each worker's; given up by `Worker.run`.
            shared: the same on all.
            batches: each worker's, of each step.
            equal: for each leaf of own, whether it is equal in all lanes.
        """
        arguments = own, (jax.tree.map(self._layout.copy, shared), batches)
        for leaf in jax.tree.leaves(own):
            inputs.check_own(leaf, self._layout.shape)
        leaves, structure = jax.tree.flatten(arguments)
        key = program, equal, structure, *map(jax.typeof, leaves)
        if key not in self.compiled:
            start = time.perf_counter()
            self.compiled[key] = self._compile(program, arguments, equal)
            self.seconds += time.perf_counter() - start
        own, common = self.compiled[key](*arguments)
        if program is Worker.init or (program is Worker.run and equal is not None):
            self._equal.note(own)  # of other states nothing is known
        if self._layout.blocking:
            jax.block_until_ready((own, common))
        return own, jax.tree.map(self._layout.one_copy, common)

    def _compile(self, program: Any, arguments: PyTree, equal: Any) -> Any:
        worker, layout, is_run = self._worker, self._layout, program is Worker.run
        if isinstance(program, Agree):
            form = program
        elif is_run and not debugging():
            form = selection.choose(self._lane_form, worker, layout, arguments, equal)
            self.form = form
        else:
            form = Together(program, equal)
        mapped = form.mapped(worker, layout, donate=is_run)
        if debugging():
            return mapped
        compiled = lower(layout, mapped, arguments).compile()
        if is_run and (held := compiled.memory_analysis()):
            self.temp_bytes = max(self.temp_bytes or 0, held.temp_size_in_bytes)
        return compiled
