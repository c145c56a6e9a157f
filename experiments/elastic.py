"""An experiment: going on with the workers that are left when a process is lost.

    python -m experiments.elastic --algo bmuf --processes 3 --workers 6

docs/many-hosts.md says what it can and cannot do. It rests on jax's `live_devices`,
which jax itself calls unstable; `experiments.run` restarts from a checkpoint instead.
"""

import copy
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
from jax.experimental.multihost_utils import ProcessFailureError, live_devices

from experiments.checkpoint import state_arrays
from experiments.cli import exits, flags, terminal
from experiments.cli.errors import BadRequest
from experiments.cli.flags import Request
from experiments.launch import gloo, joining, membership
from experiments.supervisor.addresses import free_port
from experiments.supervisor.child_side import ChildSide, join_supervisor
from experiments.supervisor.group import Group, Rules, Start, processes
from experiments.supervisor.local_processes import LocalProcesses
from experiments.supervisor.process_status import (
    ProcessStatus,
    TrackedProcess,
    end_line,
)
from experiments.training import loop
from experiments.training.prepared import params_sha256
from experiments.training.process_group import Team
from experiments.training.progress import Progress
from experiments.training.setup import Plan, prepare
from syncalgos import Replica, TrainState

PROGRAM = [sys.executable, "-m", "experiments.elastic"]
HEARTBEAT = 10  # seconds of silence after which jax counts a process as lost

# Without it a process may wait for ever for one that has noticed the loss and left.
TIMEOUT = "--xla_cpu_collective_timeout_seconds=10"

ABSENT = ("coordinator", "process_id", "num_processes", "distributed", "max_restarts")
ABSENT += ("devices", "checkpoint_every", "resume", "resume_center", "out", "overwrite")
ABSENT += ("export", "displacements", "partition")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the flags; None means those of the process.

    Returns:
        The exit code: as of `experiments.run`; 0 also if only some processes are left.
    """
    argv = sys.argv[1:] if argv is None else argv
    if (member := join_supervisor()) is not None:
        _take_part(member, argv)
    return exits.guarded(lambda stopped: _supervise(flags.parse(argv), argv, stopped))


def _group(request: Request) -> Group:
    """The processes that a request asks for; refuses what is not done here."""
    given, default = vars(request.settings), vars(flags.parse([]).settings)
    if other := [name for name in ABSENT if given[name] != default[name]]:
        flag = f"--{other[0].replace('_', '-')}"
        raise BadRequest(f"{flag}: only {flags.PROGRAM} has that")
    if (group := membership.group(request.settings)) is None:
        raise BadRequest("--processes must be at least 2, got 1")
    return group


def _supervise(request: Request, argv: list[str], stopped: exits.Stopped) -> int | None:
    """Starts the processes and watches them; whatever happens, none is left."""
    group, rules = _group(request), Rules(request.settings.init_timeout)
    # For the processes: the user's own flags win; all of them would tell of each loss.
    os.environ["XLA_FLAGS"] = f"{TIMEOUT} {os.environ.get('XLA_FLAGS', '')}"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    local = LocalProcesses(group, [*PROGRAM, *argv], rules, terminal.say)
    places = [(i, i, group.count) for i in group.ids]
    named, code = set(), None
    try:
        local.start(Start(0, 0, f"127.0.0.1:{free_port()}", 1, places, {}))
        while code is None and not stopped():
            time.sleep(0.03)
            local.poll(time.monotonic())
            for seen in local.statuses():
                if seen.code and seen.process not in named:
                    named.add(seen.process)
                    terminal.say(end_line(TrackedProcess(seen, None, 0.0), rules.loss))
            code = _verdict(local.statuses())
        return code
    finally:
        local.kill()


def _verdict(members: list[ProcessStatus]) -> int | None:
    """The exit code once process 0 is done or gone, or one at the start."""
    first = members[0]
    if first.phase == "done":
        return exits.DONE
    for seen in [first] if first.phase == "train" else members:
        if seen.code is not None:
            return seen.code if seen.said == "refused" else exits.TERMINATED
    return None


def _take_part(member: ChildSide, argv: list[str]) -> NoReturn:
    """Is one of the processes, until the supervisor ends them, all at once."""
    joining._take_streams(member)
    try:
        _train(member, argv)
        member.report("done")
        while True:
            time.sleep(1)
    except BadRequest as error:
        member.refuse(f"error: {' '.join(str(error).split())}", exits.BAD_REQUEST)
    except Exception as error:  # of jax any
        if member.process == 0:
            time.sleep(1)  # its end is the run's: who is to blame shall tell first
        member.refuse(f"{type(error).__name__}: {error}".split("\n")[0], exits.FAILED)


class _Held(NamedTuple):
    """What is committed, on the host: this process's workers, and the center."""

    state: TrainState
    center: Replica
    plan: Plan  # by which


def _train(member: ChildSide, argv: list[str]) -> None:
    """Trains to the end with whoever is left."""
    request = flags.parse(argv)
    plan = whole = _connected(member, request)
    s, progress, since = whole.settings, Progress(), time.monotonic()
    advance, held, gone = None, None, set()
    terminal.say(f"{s.algo} on {s.task}: {s.steps} steps, {_of(whole, whole)}")
    while progress.step < s.steps:
        member.report("train", progress.step)
        try:
            with live_devices(jax.devices()) as live:
                if advance is None:
                    plan = _with(live, whole, request)
                    advance = _make_advance(plan, progress.step)
                held_now, now = advance(held, progress)
        except ProcessFailureError as error:  # nobody has committed that dispatch
            gone |= {device.process_index for device in error.failed_devices}
            advance = None
            continue
        took, since = time.monotonic() - since, time.monotonic()
        if gone:
            terminal.say(
                f"without {processes([*gone])} from step {progress.step} on: "
                f"{_of(plan, whole)}; that dispatch took {took:.1f} s"
            )
        for line in now.lines[len(progress.lines) :]:
            terminal.say(terminal.evaluation_line(line, s.steps))
        held, progress, gone = held_now, now, set()
    assert held is not None
    line = terminal.evaluation_line(progress.lines[-1], s.steps)
    sha = params_sha256(held.center)
    terminal.show(f"{line}  with {_of(plan, whole)}, params_sha256 {sha}")


def _connected(member: ChildSide, request: Request) -> Plan:
    """Joins the other processes; the plan for all of them."""
    member.report("connect")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_enable_recoverability", True)
    count = member.processes
    bind_address = gloo.listen_towards(member.jax_coordinator)
    jax.distributed.initialize(
        member.jax_coordinator,
        count,
        member.process,
        local_device_ids=[member.local],
        initialization_timeout=round(member.init_timeout),
        coordinator_bind_address=bind_address,
        heartbeat_timeout_seconds=HEARTBEAT,
    )
    member.report("prepare")
    plan = prepare(request, team=Team(member.process, count, sharing=count))
    if plan.task.kept == "sharded":
        raise BadRequest("--tables sharded: the rows of lost workers would be lost")
    return plan


def _with(live: list[Any], whole: Plan, request: Request) -> Plan:
    """The plan for the processes that are left, each with as many workers.

    A worker's part of the batch stays as it is; the global batch shrinks.
    """
    left = sorted({device.process_index for device in live})
    if jax.process_index() not in left:  # it was stopped, and given up
        raise BadRequest("the others have gone on without it")
    count = whole.team.processes
    if len(left) == count:
        return whole
    s = Namespace(**vars(whole.settings))
    s.workers = s.workers // count * len(left)
    s.batch_size = s.batch_size // count * len(left)
    s.devices = [d for d in whole.trainer.layout.devices if d in live]
    team = Team(left.index(jax.process_index()), len(left), sharing=count)
    return prepare(request._replace(settings=s), whole.data, team)


def _make_advance(plan: Plan, step: int) -> Callable[..., Any]:
    """Returns (held, progress) -> the same after a dispatch."""
    s, trainer = plan.settings, plan.trainer
    due = loop.evaluations(s)
    parts = [*loop.remaining(loop.dispatches(due, s.dispatch_steps), step)]
    dispatch = loop._make_dispatch(plan, parts)
    evaluate, ahead = loop._make_evaluation(plan, lambda progress: None), iter(parts)

    def advance(held, progress):
        now = copy.deepcopy(progress)
        state, metrics, took = dispatch(_placed(plan, held), *next(ahead))
        now.stepped(metrics["loss"].tolist(), took)
        if now.step in due:
            now.told(evaluate(state, now))
        center = jax.device_get(trainer.center(state))
        return _Held(trainer.to_host(state), center, plan), now

    return advance


def _placed(plan: Plan, held: _Held | None) -> TrainState:
    """The state on the devices; new replicas from the center if workers are gone."""
    trainer, seed = plan.trainer, plan.settings.seed
    if held is None:
        return trainer.init(*plan.task.init(jax.random.key(seed)), seed)
    if held.plan is plan:
        return trainer.from_host(held.state)
    like = trainer.init(held.center.params, held.center.buffers, seed)
    one = {name: x[:1] for name, x in state_arrays.own(held.state).items()}
    shared = state_arrays.shared(held.state, held.center)
    return state_arrays.restarted(trainer, seed, like, one, shared)


def _of(plan: Plan, whole: Plan) -> str:
    """How much of the run there still is."""
    workers = f"{plan.settings.workers} of {whole.settings.workers} workers"
    return f"{workers} in {plan.team.processes} of {whole.team.processes} processes"


if __name__ == "__main__":
    sys.exit(main())
