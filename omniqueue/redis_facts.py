"""What a Redis or Valkey server says of itself. No key is named here."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any, cast

import redis

from omniqueue.connection import connect, reachable


@dataclass(frozen=True, kw_only=True)
class RedisFacts:
    """A server's version, settings and state; sizes in bytes."""

    #: "Valkey" or "Redis", and the version whose commands it has.
    product: str
    version: str
    #: Whether it writes an append-only file, and whether it writes snapshots; None where it does not tell.
    append_only: bool
    snapshots: bool | None
    #: The last write to its disk went wrong.
    write_failed: bool
    policy: str
    #: 0 is no limit.
    max_memory: int
    used_memory: int
    #: Its clock minus ours, in seconds, and how exactly that is known.
    ahead_s: float
    within_s: float

    @property
    def major(self) -> int:
        """The first part of the version."""
        return int(self.version.split(".")[0])


def read(url: str, timeout_s: float) -> RedisFacts:
    """Ask the server. Raises BrokerUnavailable, whose cause is the client's own error."""
    client = connect(url, timeout_s)
    try:
        with reachable():
            info: dict[str, Any] = client.info()
            before = time.time()
            seconds, micros = client.time()
            after = time.time()
            saves = _setting(client, "save")
    finally:
        client.close()
    return RedisFacts(
        product="Valkey" if "valkey_version" in info else "Redis",
        version=str(info["redis_version"]),
        append_only=bool(int(info.get("aof_enabled", 0))),
        snapshots=None if saves is None else bool(saves),
        write_failed="err" in (info.get("aof_last_write_status"), info.get("rdb_last_bgsave_status")),
        policy=str(info.get("maxmemory_policy", "noeviction")),
        max_memory=int(info.get("maxmemory", 0)),
        used_memory=int(info.get("used_memory", 0)),
        ahead_s=seconds + micros / 1e6 - (before + after) / 2,
        within_s=(after - before) / 2,
    )


def _setting(client: redis.Redis, name: str) -> str | None:
    """None where the server refuses to tell, as hosted ones do."""
    with contextlib.suppress(redis.ResponseError):
        found = cast("dict[str, str]", client.config_get(name))
        return found.get(name)
    return None
