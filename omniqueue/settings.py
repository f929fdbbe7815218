"""OMNIQUEUE_* environment variables, read once; a bad value names the key and the value."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import parse_qs, urlsplit

from omniqueue import checks, errors

T = TypeVar("T")

_HOST = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_RATE = re.compile(r"[1-9][0-9]{0,5}/(second|minute|hour|day)")


@dataclass(frozen=True)
class Settings:
    """Everything that comes from the environment rather than from a stage config."""

    #: Redis or Valkey: job records, leases, replies; also the broker unless ``broker_url`` says otherwise.
    redis_url: str = "redis://127.0.0.1:6379/0"
    #: Celery's broker when it is not the same Redis (for example RabbitMQ).
    broker_url: str | None = None
    #: Prefix of every Redis key of ours. Queues keep their names: a second deployment needs a database of its own.
    namespace: str = "oq"
    #: Stage configs, separated by the path separator when a router serves several pipelines.
    stage_configs_path: str | None = None
    #: Checkpoint folder or hub id; wins over the config's ``model``.
    model: str | None = None
    #: Replaces the config's served model names.
    served_model_name: str | None = None
    #: Where payloads lie.
    shm_dir: str = "/dev/shm"
    #: Name of this host in payload references; replicas that share one /dev/shm must agree on it.
    host: str | None = None
    #: fsspec URL under which finished media are stored by the last stage's worker.
    media_fs_url: str = ""
    #: Public URL prefix of that place; without it the router serves the files itself.
    media_http_url: str | None = None
    #: After SIGTERM: how long running work may take to finish before it is handed back, in seconds.
    drain_grace_s: float = 60.0
    #: A file that a worker touches with each beat, for health checks that ask nobody: its age is the worker's silence.
    pulse_file: str | None = None
    #: How long Redis may take to answer a request's first question, in seconds.
    redis_timeout_s: float = 1.5
    #: Which of a stage's replicas this worker is, when the config names several (num_replicas): picks its devices.
    replica: int = 0
    #: Devices that the workers of one stage share out among themselves, each taking what it needs and nobody else has.
    device_pool: tuple[str, ...] = ()
    #: How log lines are written: text or json.
    log_format: str = "text"
    #: Where spans go: "otlp", as the OTEL_* variables say, or "file:PATH". Without it nothing is traced.
    traces: str | None = None
    #: Threads of one router process: clients that can wait at once.
    router_threads: int = 256
    #: Keys of which every request but GET /health has to bring one; without any, everybody is let in.
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    #: A file with more of them, one a line; lines that begin with # are left out.
    api_keys_file: str | None = None
    #: How many requests that make work one key (or address, without keys) may send: "60/minute".
    rate_limit: str | None = None
    #: Largest body of a request that brings media, in bytes.
    max_upload_bytes: int = 32 << 20
    #: Hosts whose media a request may name by URL; "*" is every public one. Without any, no URL is ever opened.
    allow_remote_media: tuple[str, ...] = ()

    def celery_broker(self) -> str:
        """The broker's URL as kombu spells it: ``unix://PATH?db=N`` is ``redis+socket://PATH?virtual_host=N``."""
        if self.broker_url or not self.redis_url.startswith("unix://"):
            return self.broker_url or self.redis_url
        parts = urlsplit(self.redis_url)
        database = parse_qs(parts.query).get("db", ["0"])[0]
        login = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
        return f"redis+socket://{login}{parts.path}?virtual_host={database}"

    def payload_namespace(self) -> str:
        """Short name that keeps two deployments on one host apart; the same after a restart, no secret in it."""
        parts = urlsplit(self.redis_url)
        place = f"{parts.scheme}://{parts.hostname or ''}:{parts.port or ''}{parts.path}?{parts.query}|{self.namespace}"
        return hashlib.sha256(place.encode()).hexdigest()[:8]


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("it is empty")
    return value


def _names(value: str) -> str:
    if not _words(value):
        raise ValueError("it names nothing")
    return value


def _words(value: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in value.split(",") if word.strip())


def _format(value: str) -> str:
    if value not in ("text", "json"):
        raise ValueError("it must be text or json")
    return value


def _traces(value: str) -> str:
    if value != "otlp" and not re.fullmatch("file:.+", value):
        raise ValueError("it must be otlp or file:PATH")
    return value


def _devices(value: str) -> tuple[str, ...]:
    complaint = checks.devices(value)
    if complaint:
        raise ValueError(complaint.replace("must be", "it must be"))
    return _words(value)


def _keys(value: str) -> tuple[str, ...]:
    keys = _words(value)
    if not keys:
        raise ValueError("it holds no key")
    return keys


def _hosts(value: str) -> tuple[str, ...]:
    hosts = _words(value.lower())
    if not hosts or not all(host == "*" or _HOST.fullmatch(host) for host in hosts):
        raise ValueError("it must be host names, separated by commas, or *")
    return hosts


def _rate(value: str) -> str:
    if not _RATE.fullmatch(value):
        raise ValueError("it must be a number per second, minute, hour or day, such as 60/minute")
    return value


def _seconds(value: str) -> float:
    number = float(value)
    if not 0 < number < 1e9:
        raise ValueError("it must be a number of seconds above 0")
    return number


def _count(value: str) -> int:
    number = int(value)
    if not 0 < number < 100_000:
        raise ValueError("it must be a whole number above 0")
    return number


def _bytes(value: str) -> int:
    number = int(value)
    if not 1 << 16 <= number <= 1 << 32:
        raise ValueError("it must be a number of bytes from 65536 to 4294967296")
    return number


def _index(value: str) -> int:
    number = int(value)
    if not 0 <= number < 1024:
        raise ValueError("it must be a whole number from 0")
    return number


def _redis_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("redis", "rediss", "unix") or not value.startswith(f"{parts.scheme}://"):
        raise ValueError("it must begin with redis://, rediss:// or unix://")
    if parts.port == 0:  # reading it raises ValueError for what is no port
        raise ValueError("its port must not be 0")
    return value


def is_loopback(host: str) -> bool:
    """True for a name or address that only this machine can reach."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def default_media_dir() -> str:
    """Where media go when nothing is configured: a folder of this user under the temporary directory."""
    return "file://" + os.path.join(tempfile.gettempdir(), f"omniqueue-media-{os.getuid()}")


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from the environment. Raises ConfigError that names the key and the value."""
    env = os.environ if environ is None else environ

    def get(name: str, cast: Callable[[str], T], default: T, secret: bool = False) -> T:
        key = f"OMNIQUEUE_{name}"
        value = env.get(key)
        if value is None or value == "":
            return default
        try:
            return cast(value)
        except ValueError as exc:
            shown = "***" if secret else re.sub(r"//[^/]*@", "//***@", value)  # a login is nobody's business
            raise errors.ConfigError(f"{key}={shown!r} is not valid: {exc}.", param=key) from None

    base = Settings()
    return Settings(
        redis_url=get("REDIS_URL", _redis_url, base.redis_url),
        broker_url=get("BROKER_URL", _text, base.broker_url),
        namespace=get("NAMESPACE", _text, base.namespace),
        stage_configs_path=get("STAGE_CONFIGS_PATH", _text, base.stage_configs_path),
        model=get("MODEL", _text, base.model),
        served_model_name=get("SERVED_MODEL_NAME", _names, base.served_model_name),
        shm_dir=get("SHM_DIR", _text, base.shm_dir),
        host=get("HOST", _text, base.host),
        media_fs_url=get("MEDIA_FS_URL", _text, default_media_dir()),
        media_http_url=get("MEDIA_HTTP_URL", _text, base.media_http_url),
        drain_grace_s=get("DRAIN_GRACE_S", _seconds, base.drain_grace_s),
        pulse_file=get("PULSE_FILE", _text, base.pulse_file),
        redis_timeout_s=get("REDIS_TIMEOUT_S", _seconds, base.redis_timeout_s),
        replica=get("REPLICA", _index, base.replica),
        device_pool=get("DEVICE_POOL", _devices, base.device_pool),
        log_format=get("LOG_FORMAT", _format, base.log_format),
        traces=get("TRACES", _traces, base.traces),
        router_threads=get("ROUTER_THREADS", _count, base.router_threads),
        api_keys=get("API_KEYS", _keys, base.api_keys, secret=True),
        api_keys_file=get("API_KEYS_FILE", _text, base.api_keys_file),
        rate_limit=get("RATE_LIMIT", _rate, base.rate_limit),
        max_upload_bytes=get("MAX_UPLOAD_BYTES", _bytes, base.max_upload_bytes),
        allow_remote_media=get("ALLOW_REMOTE_MEDIA", _hosts, base.allow_remote_media),
    )
