"""When Python looks for garbage: not among what a process keeps for good, and not after every few requests."""

from __future__ import annotations

import gc

#: New objects between two looks. A request makes hundreds, which go by themselves: Python's own 700 is too often.
_THRESHOLD = 20_000


def settle() -> None:
    """Called once a process has loaded what it keeps: looking through that takes 50 ms and more.

    In a router all requests in flight would wait for it, in a worker it would cost a twentieth of a hop.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_THRESHOLD)
