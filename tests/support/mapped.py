"""One worker's program mapped over all workers, as the engine does it."""

from functools import partial

from syncalgos.engine.placement.backends import over_devices, vectorized
from syncalgos.engine.program import Inputs, Outputs


def spread(layout, program):
    """Maps one worker's (own, shared) -> result over all workers.

    Returns:
        A jitted (own, Inputs) -> Outputs, whose `own` is the result of each worker.
    """

    def view(own, inputs):
        return Outputs(program(own, inputs.shared), ())

    on_device = partial(vectorized, view, layout.lanes, None)
    return over_devices(layout, on_device, donate=False)


def on_workers(layout, program, own, shared=()):
    """Runs such a program; own and the result lead with (devices, lanes)."""
    return spread(layout, program)(own, Inputs(shared)).own
