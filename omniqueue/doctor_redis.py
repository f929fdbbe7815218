"""The doctor's look at Redis: reachable, new enough, keeps its data, evicts nothing, has the same time."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from omniqueue import errors, redis_facts, settings
from omniqueue.finding import Finding, error, ok, warning
from omniqueue.redis_facts import RedisFacts

#: BLMPOP, which routers and workers wait with, came with this version.
_OLDEST = 7
#: Clocks that differ by less are taken as equal, in seconds.
SKEW_S = 2.0
#: A share of the memory limit above which new jobs will soon be refused.
_FULL = 0.9


def examine(config: settings.Settings) -> Iterator[Finding]:
    """Every finding about the server behind OMNIQUEUE_REDIS_URL."""
    try:
        facts = redis_facts.read(config.redis_url, config.redis_timeout_s)
    except errors.BrokerUnavailable as exc:
        yield _away(exc)
        return
    yield _version(facts)
    yield _password(config)
    yield _persistence(facts)
    yield _eviction(facts)
    yield _clock(facts)


def _away(exc: errors.BrokerUnavailable) -> Finding:
    why = str(exc.__cause__ or exc).rstrip(".")
    if any(word in why for word in ("NOAUTH", "WRONGPASS", "uthenticat")):
        return error("redis", f"Redis wants another login: {why}.", "Put the password into OMNIQUEUE_REDIS_URL.")
    return error(
        "redis", f"Redis does not answer: {why}.", "Start it, or let OMNIQUEUE_REDIS_URL say where it is listening."
    )


def _version(facts: RedisFacts) -> Finding:
    text = f"{facts.product} with the commands of Redis {facts.version}"
    if facts.major < _OLDEST:
        return error("redis", f"{text}, which lack BLMPOP.", f"Use Redis {_OLDEST} or newer, or Valkey.")
    return ok("redis", f"{text}.")


def _password(config: settings.Settings) -> Finding:
    parts = urlsplit(config.redis_url)
    if parts.scheme == "unix" or parts.password or settings.is_loopback(parts.hostname or "localhost"):
        return ok("login", "Redis is reached with a password or on this machine only.")
    return warning(
        "login",
        "Redis is reached over the network without a password, so whoever reaches it can enqueue work.",
        "Set requirepass there, and the password in OMNIQUEUE_REDIS_URL.",
    )


def _persistence(facts: RedisFacts) -> Finding:
    if facts.write_failed:
        return error(
            "disk", "Redis could not write to its disk, and takes no new jobs.", "Make room on the disk of its data."
        )
    if facts.append_only:
        return ok("disk", "Redis keeps an append-only file: jobs outlive its restart.")
    if facts.snapshots:
        return warning(
            "disk", "Redis writes snapshots only: a restart loses the jobs since the last one.", "Set appendonly yes."
        )
    return warning("disk", "Redis keeps nothing on disk: its restart forgets every job.", "Set appendonly yes.")


def _eviction(facts: RedisFacts) -> Finding:
    if facts.policy != "noeviction":
        limit = "once its memory is full" if facts.max_memory else "as soon as it is given a memory limit"
        level = error if facts.max_memory else warning
        return level(
            "eviction",
            f"maxmemory-policy is {facts.policy}: Redis would drop queued jobs {limit}.",
            "Set maxmemory-policy noeviction.",
        )
    if facts.max_memory and facts.used_memory > _FULL * facts.max_memory:
        return warning(
            "eviction",
            f"Redis uses {facts.used_memory / facts.max_memory:.0%} of its maxmemory, and refuses jobs at its end.",
            "Raise maxmemory, or lower result_ttl_s or max_queue in the stage config.",
        )
    return ok("eviction", "Redis drops nothing (maxmemory-policy noeviction).")


def _clock(facts: RedisFacts) -> Finding:
    off_s = abs(facts.ahead_s) - facts.within_s
    if off_s > SKEW_S:
        return warning(
            "clock",
            f"The clock of Redis differs from this host's by {off_s:.0f} s, so times in logs and jobs do not agree.",
            "Let all hosts keep time by NTP.",
        )
    return ok("clock", "This host and Redis have the same time.")
