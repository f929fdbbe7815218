"""gunicorn with the settings that waiting requests need: ``python -m web.server --bind 127.0.0.1:8000``."""

from __future__ import annotations

import argparse
import functools
import json
import math
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flask
from gunicorn import util
from gunicorn.app.base import BaseApplication

from omniqueue import catalog, embedded, errors, garbage, logs, media, settings, tracing
from web import keys

#: Beyond the grace period in which waiting requests are answered: time to send the answers, in seconds.
_MARGIN_S = 3
#: How long a client may send nothing in the middle of a request, or take nothing of an answer, in seconds.
_SILENCE_S = 30


def options(bind: str, config: settings.Settings, workers: int = 1) -> dict[str, Any]:
    """gunicorn's settings by name, each with its why."""
    return {
        "bind": bind,
        "workers": workers,
        # A request waits for its job in a thread; a thread that waits costs a few kilobytes.
        "worker_class": "gthread",
        "threads": config.router_threads,
        # Idle keep-alive connections beside those that wait.
        "worker_connections": config.router_threads + 1000,
        # With gthread this watches the worker's main loop, not the requests: those end by their job's deadline.
        "timeout": 60,
        "graceful_timeout": math.ceil(config.drain_grace_s) + _MARGIN_S,
        # Longer than the idle time of common proxies, which would otherwise meet a closing connection.
        "keepalive": 75,
        # The heartbeat file on a disk that stalls would get healthy workers killed.
        "worker_tmp_dir": config.shm_dir,
        # From this host gunicorn would take SCRIPT_NAME and PATH_INFO, headers that anybody can send: a path that does
        # not begin with the one would be answered 500, and URLs in answers would begin with it.
        "forwarder_headers": "",
        # No second way in, and no socket left behind.
        "control_socket_disable": True,
        "when_ready": _bound_silence,
        "post_fork": _die_with_master,
        "post_worker_init": _start_worker,
        "worker_exit": _tell_rest,
        "loglevel": "warning",
        "proc_name": "omniqueue-router",
    }


def _bound_silence(arbiter: Any) -> None:
    """Accepted sockets inherit this: gthread has no such limit, and stalled clients would take every thread.

    Waiting for a job and idle keep-alive connections do not read, so they are not cut off.
    """
    logs.adopt("gunicorn.error")
    for listener in arbiter.LISTENERS:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            listener.sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _SILENCE_S, 0))


def _die_with_master(server: Any, worker: Any) -> None:
    """A worker whose master was killed gets SIGTERM instead of living on."""
    embedded.die_with_parent()


def _start_worker(worker: Any) -> None:
    """After the fork: start the threads, so that an idle router also reaps, and drain on SIGTERM."""
    from web import services

    router = services.of(worker.wsgi)
    router.start()
    garbage.settle()

    def on_term(number: int, frame: Any) -> None:
        router.shut_down()
        worker.handle_exit(number, frame)

    signal.signal(signal.SIGTERM, on_term)


def _tell_rest(server: Any, worker: Any) -> None:
    """What this process has counted and not yet told; it may have failed before it had an application."""
    from web import services

    if getattr(worker, "wsgi", None) is not None:
        services.of(worker.wsgi).traffic.stop()
        tracing.shutdown()


def _write_error(connection: socket.socket, status: int, reason: str, message: str) -> None:
    """What is no HTTP never reaches the application: gunicorn's own errors, in the shape of all others."""
    kind, code = "invalid_request_error" if status < 500 else "server_error", reason.lower().replace(" ", "_")
    text = " ".join(part for part in (f"{reason}.", message[:200]) if part)
    body = json.dumps({"error": {"message": text, "type": kind, "param": None, "code": code}})
    head = f"HTTP/1.1 {status} {reason}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    util.write_nonblock(connection, f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode("ascii"))


class Server(BaseApplication):  # type: ignore[misc]
    """The router under gunicorn; ``factory`` makes the application, in each worker."""

    def __init__(self, factory: Callable[[], flask.Flask], chosen: Mapping[str, Any]) -> None:
        self._factory, self._options = factory, chosen
        super().__init__()

    def load_config(self) -> None:
        """Called by gunicorn: no configuration file is looked for."""
        util.write_error = _write_error
        for name, value in self._options.items():
            self.cfg.set(name, value)

    def load(self) -> flask.Flask:
        """Called by gunicorn in each worker."""
        return self._factory()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; status 2 and a sentence for a configuration that is not valid."""
    parser = argparse.ArgumentParser(prog="web.server", description="The omniqueue HTTP router.")
    parser.add_argument("--bind", default="127.0.0.1:8000", help="HOST:PORT or unix:PATH (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="router processes (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    try:
        config = settings.load()
        logs.configure(config.log_format)
        known = catalog.load(config)
        media.shared(config.media_fs_url)
        keys.Keys.load(config)
    except errors.ConfigError as exc:
        sys.stderr.write(f"omniqueue: {exc.message}\n")
        raise SystemExit(2) from None
    # Not before the environment has been checked: the Celery app reads it when it is imported.
    from web import app

    factory = functools.partial(app.create_app, config, known)  # the stage configs are read once, before the fork
    Server(factory, options(chosen.bind, config, chosen.workers)).run()


if __name__ == "__main__":
    main()
