"""How Redis is reached: time-outs, what is tried again, and the one error for its absence. No key is named here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from omniqueue import errors, functions


def connect(url: str, timeout_s: float, **options: Any) -> redis.Redis:
    """A client that answers or fails within ``timeout_s``; redis-py's own defaults are 5 s and 100 connections."""
    return redis.Redis.from_url(
        url,
        decode_responses=True,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        max_connections=4096,
        # Once, for a pooled connection that a restart of Redis has closed; a time-out is not retried, or a Redis that
        # hangs would take twice ``timeout_s``.
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        health_check_interval=30,
        **options,
    )


@contextlib.contextmanager
def reachable() -> Iterator[None]:
    """Turn the client's connection errors into ours."""
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError, redis.ReadOnlyError) as exc:
        raise errors.BrokerUnavailable() from exc
    except redis.OutOfMemoryError as exc:  # maxmemory reached: nothing was written
        raise errors.BrokerUnavailable("Redis is out of memory, so nothing was accepted.") from exc
    except redis.ResponseError as exc:
        if "MISCONF" in str(exc):  # it takes no more writes
            raise errors.BrokerUnavailable("Redis cannot write to its disk, so nothing was accepted.") from exc
        if str(exc).startswith("BUSY "):
            raise errors.BrokerUnavailable("Redis is busy with somebody's script, so nothing was accepted.") from exc
        if functions.missing(exc):  # again, right after it was loaded
            raise errors.BrokerUnavailable("Redis does not keep functions, so nothing was accepted.") from exc
        raise
