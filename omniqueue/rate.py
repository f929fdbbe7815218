"""How many requests one caller may send: counted in Redis, so that all router processes count together."""

from __future__ import annotations

import math
import time

import limits
from limits.storage import RedisStorage
from limits.strategies import MovingWindowRateLimiter

from omniqueue import settings, store
from omniqueue.connection import reachable


class RateLimit:
    """``60/minute`` and the like: a moving window, whose counts the library keeps under a prefix of ours."""

    def __init__(self, config: settings.Settings, records: store.Store) -> None:
        """``records`` gives the connections."""
        self._rate = limits.parse(config.rate_limit or "1/second")
        pool = records.client.connection_pool
        # The pool has the real address; the library looks at the URL's scheme only.
        storage = RedisStorage("redis://", connection_pool=pool, key_prefix=":".join((records.namespace, "rate")))
        self._window = MovingWindowRateLimiter(storage)

    def hit(self, who: str) -> int:
        """Count one request of ``who``: 0 when it may go on, else the seconds after which it may.

        Raises BrokerUnavailable.
        """
        with reachable():
            if self._window.hit(self._rate, who):
                return 0
            free_at = self._window.get_window_stats(self._rate, who).reset_time
        return max(1, math.ceil(free_at - time.time()))
