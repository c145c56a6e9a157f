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
SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
SO_RCVBUFFORCE = 33
ETH_P_ALL = 3
LARGEST = 1 << 17  # bytes of a segment
ROOM = 1 << 26  # bytes that may wait to be read
# Where a frame has its receiver and sender, after the header of PACKET_VNET_HDR.
RECEIVER = slice(10, 16)
SENDER = slice(16, 22)


def open_interface(interface: str) -> socket.socket:
    """Opens an interface for whole frames."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, ROOM)
    end.bind((interface, ETH_P_ALL))
    return end


def carry(*ends: socket.socket) -> None:
    """Forwards frames until standard input ends; to all if the receiver is unknown."""
    homes: dict[bytes, socket.socket] = {}
    waiting: deque[tuple[float, list[socket.socket], bytes]] = deque()
    delay: float | None = 0.0
    while delay is not None:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready = select.select([*ends, sys.stdin], [], [], timeout)[0]
        for end in {*ends}.intersection(ready):
            due_time = time.monotonic() + delay
            frame = end.recv(LARGEST)
            homes[frame[SENDER]] = end
            home = homes.get(frame[RECEIVER])
            if home is None:
                targets = [other for other in ends if other is not end]
            else:
                targets = [home]
            waiting.append((due_time, targets, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, targets, frame = waiting.popleft()
            for end in targets:
                end.send(frame)
        if sys.stdin in ready:
            delay = read_delay()


def read_delay() -> float | None:
    """Reads a new delay from standard input; returns None at its end."""
    line = sys.stdin.readline()
    if not line:
        return None
    print(line, end="", flush=True)
    return float(line)


if __name__ == "__main__":
    carry(*map(open_interface, sys.argv[1:]))
