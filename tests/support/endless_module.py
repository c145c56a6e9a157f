"""A module of a user's own that never comes to an end, and says so."""

import sys
import threading

print("waiting in import", file=sys.stderr, flush=True)
while not threading.Event().wait(0.1):  # a signal just before a longer one is missed
    pass
