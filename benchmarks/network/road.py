"""Forwards frames between network interfaces, as a switch does, after a delay.

`python -m benchmarks.network.road A B …` runs in the network namespace that has them. A
line on standard input sets the delay in seconds, and is echoed when it holds.
"""

import select
import socket
import sys
import time
from collections import deque

# From <linux/if_packet.h>: segments of 64 kB stay whole, and frames that leave an
# interface are not received on it again.
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_RCVBUFFORCE = 33
EVERY = 3  # ETH_P_ALL
LARGEST = 1 << 17  # bytes of a segment
ROOM = 1 << 26  # bytes that may wait to be read
# Where a frame has its receiver and sender, after the header of PACKET_VNET_HDR.
TO, SENDER = slice(10, 16), slice(16, 22)


def opened(interface: str) -> socket.socket:
    """Opens an interface for whole frames."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, ROOM)
    end.bind((interface, EVERY))
    return end


def carry(*ends: socket.socket) -> None:
    """Forwards frames until standard input ends; to all if the receiver is unknown."""
    homes: dict[bytes, socket.socket] = {}
    waiting: deque[tuple[float, list[socket.socket], bytes]] = deque()
    delay: float | None = 0.0
    while delay is not None:
        soon = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready = select.select([*ends, sys.stdin], [], [], soon)[0]
        for end in {*ends}.intersection(ready):
            due, frame = time.monotonic() + delay, end.recv(LARGEST)
            homes[frame[SENDER]] = end
            home = homes.get(frame[TO])
            others = [x for x in ends if x is not end] if home is None else [home]
            waiting.append((due, others, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, others, frame = waiting.popleft()
            for end in others:
                end.send(frame)
        if sys.stdin in ready:
            delay = told()


def told() -> float | None:
    """Reads a new delay from standard input; returns None at its end."""
    if not (line := sys.stdin.readline()):
        return None
    print(line, end="", flush=True)
    return float(line)


if __name__ == "__main__":
    carry(*map(opened, sys.argv[1:]))
