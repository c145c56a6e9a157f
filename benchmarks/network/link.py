"""Links with a rate and a latency between hosts, which are network namespaces.

It needs Linux, `ip` and `tc`, and root. Each host has a veth pair to another namespace,
the road. At each host, tc's token bucket limits the bits per second, headers included.
`road.py` delays each frame by the latency, because not every kernel has tc's netem.
"""

import os
import shlex
import subprocess
import sys
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path

FIRST_ADDRESS = "10.77.0.1"  # the address of the first host, unseen from outside
INTERFACE = "wire"  # the interface of each host, in its namespace
# Mbit/s. "No limit" needs a shaper, too: replacing none by one drops waiting frames,
# and TCP's window then grows by only a segment per round trip.
NO_LIMIT = 100_000
ROOT = Path(__file__).parents[2]


class NetworkLink:
    """Hosts and the road between them; removed when a `with` ends.

    Args:
        hosts: number of hosts.

    Attributes:
        hosts: number of hosts.

    Raises:
        OSError: privileges or a program are missing.
    """

    def __init__(self, hosts: int = 2):
        self.hosts = hosts
        names = [f"slow-link-{os.getpid()}-{end}" for end in [*range(hosts), "road"]]
        *self._hosts, self._road = names

    def __enter__(self) -> "NetworkLink":
        with ExitStack() as undo:  # undoes everything if a step fails
            undo.callback(self._remove)
            self._make()
            self._carrier = undo.enter_context(self._start_road())
            self.shape(None, 0.0)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_) -> None:
        self._undo.close()  # the road ends with its standard input

    def _make(self) -> None:
        for name in (*self._hosts, self._road):
            _system(f"ip netns add {name}")
        for end, name in enumerate(self._hosts):
            address = ip_address(FIRST_ADDRESS) + end
            pair = f"{INTERFACE} netns {name} type veth peer {end} netns {self._road}"
            _system(f"ip link add {pair}")
            _system(f"ip -n {name} addr add {address}/24 dev {INTERFACE}")
            _system(f"ip -n {name} link set lo up")
            _system(f"ip -n {name} link set {INTERFACE} up")
            _system(f"ip -n {self._road} link set {end} up")
            # The default differs between machines; Linux allows Reno everywhere.
            setting = "/proc/sys/net/ipv4/tcp_congestion_control"
            script = f"echo reno > {setting}"
            _system(shlex.join([*self.command(end), "sh", "-c", script]))

    def _remove(self) -> None:
        for name in (*self._hosts, self._road):  # the pairs go with them
            if Path("/run/netns", name).exists():
                subprocess.run(["ip", "netns", "del", name])

    def _start_road(self) -> subprocess.Popen:
        road = [sys.executable, "-m", "benchmarks.network.road"]
        ends = map(str, range(self.hosts))
        return subprocess.Popen(
            ["ip", "netns", "exec", self._road, *road, *ends],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def shape(self, rate: float | None, latency: float) -> None:
        """Sets the rate of each direction in Mbit/s, or no limit, and the latency in s.

        The bucket holds 2 ms of the rate, and at least 16 kB: with less, a late timer
        reduces the rate.
        """
        bits = round((rate or NO_LIMIT) * 1e6)
        bucket = max(16_000, round(bits / 8 * 0.002))
        shaper = f"tbf rate {bits}bit burst {bucket} latency 50ms"
        for name in self._hosts:
            _system(f"tc -n {name} qdisc replace dev {INTERFACE} root {shaper}")
        print(latency, file=self._carrier.stdin, flush=True)
        answers = self._carrier.stdout
        if not (answers and answers.readline()):
            raise OSError("the road has ended")

    def command(self, end: int) -> list[str]:
        """Returns a prefix that runs a command on a host."""
        return ["ip", "netns", "exec", self._hosts[end]]


def _system(command: str) -> None:
    """Runs a command that must succeed."""
    process = subprocess.run(shlex.split(command), capture_output=True, text=True)
    if process.returncode:
        raise OSError(f"{command}: {process.stderr.strip()}")
