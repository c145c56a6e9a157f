"""The leader of processes on other machines, which are played here."""

import signal

from experiments.launch.supervisor.group import Placement, Unplaced
from experiments.launch.supervisor.leader import Leader
from experiments.launch.supervisor.limits import Limits
from experiments.launch.supervisor.process_status import ProcessStatus

TWO = Placement("hosta:9999", [("hosta",), ("hostb",)])


class Played:
    """Processes whose places and states a test sets."""

    def __init__(self):
        self.found: Placement | Unplaced | None = TWO
        self.seen = []
        self.started = []
        self.kills = 0

    def gather(self, now):
        if isinstance(self.found, Unplaced):
            raise self.found
        return self.found

    def start(self, attributes):
        self.started.append(attributes)
        self.seen = [ProcessStatus(i, 100 + i, "train", 3) for i in (0, 1)]

    def poll(self, now):
        return self.seen

    def change(self, process, **changes):
        """Changes what is known of a process."""
        self.seen[process] = self.seen[process]._replace(**changes)

    def signal(self, number):
        pass

    def kill(self):
        self.kills += 1

    def close(self):
        pass


def leading(**limits):
    """A leader, the processes that it leads, and its lines."""
    processes, lines = Played(), []
    leader = Leader(processes, {"out": "runs/1"}, Limits(**limits), lines.append)
    return leader, processes, lines


def test_processes_start_once_there_are_places_for_all():
    leader, processes, lines = leading()
    processes.found = None
    leader.tick(0.0)
    assert not processes.started
    processes.found = TWO
    leader.tick(1.0)
    shared = {"processes": 2, "hosts": 2, "attempt": 0, "init_timeout": 60.0}
    shared |= {"announced": {"out": "runs/1"}, "jax_coordinator": "hosta:9999"}
    each = [{**shared, "process": i, "local": 0, "locals": 1} for i in (0, 1)]
    assert processes.started == [each]
    assert leader.code is None and not lines


def test_signal_ends_a_command_that_waits_for_places():
    leader, processes, lines = leading()
    processes.found = None
    leader.tick(0.0, [signal.SIGINT])
    assert (leader.code, lines) == (130, [])


def test_places_that_are_missing_end_the_run_with_4_and_after_a_start_with_75():
    for is_started, code in ((False, 4), (True, 75)):
        leader, processes, lines = leading(max_restarts=1)
        if is_started:
            leader.tick(0.0)
            processes.change(1, gone="its worker left")
            leader.tick(1.0)
        processes.found = Unplaced("the Dask scheduler tcp://a:1 is lost")
        leader.tick(2.0)
        assert leader.code == code
        assert lines[-1] == "the Dask scheduler tcp://a:1 is lost"


def test_lost_host_is_named_and_replaced():
    leader, processes, lines = leading(max_restarts=1)
    leader.tick(0.0)
    processes.change(1, gone="its worker left")
    leader.tick(1.0)
    assert lines == [
        "process 1's host hostb is gone (its worker left)",
        "restart 1 of 1",
    ]
    assert processes.kills == 1
    processes.found = TWO._replace(hosts=[("hosta",), ("hosta",)])
    leader.tick(2.0)
    assert [each[0]["attempt"] for each in processes.started] == [0, 1]
    # As at first: groups that follow the hosts must not change.
    assert [each[0]["hosts"] for each in processes.started] == [2, 2]
    processes.change(1, gone="its worker left too")
    leader.tick(3.0)
    assert leader.code == 75
    assert lines[-1] == "process 1's host hosta is gone (its worker left too)"


def test_killed_process_is_named_with_its_host():
    leader, processes, lines = leading()
    leader.tick(0.0)
    processes.change(1, code=-9)
    leader.tick(1.0)
    assert leader.code == 75
    assert lines == ["process 1 (pid 101 on hostb) was killed by SIGKILL at step 3"]
