"""``omniqueue demo``: everything from nothing to a picture on disk, and down again."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omniqueue import errors, up

Say = Callable[[str], None]


def tiny_model(say: Say) -> Path:
    """The tiny GLM-Image in the user's cache, written on first use (in a child, which may import torch)."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "omniqueue" / "tiny-glm-image-1"
    if not folder.is_dir():
        say(f"model    writing a tiny random GLM-Image to {folder}")
        command = [sys.executable, "-m", "omniqueue.cli", "tiny-checkpoint", "glm_image", "--out", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise errors.ConfigError(f"The tiny checkpoint could not be written:\n{done.stderr[-2000:]}")
    return folder


def run(prompt: str, size: str, out: Path, say: Say) -> int:
    """Start, ask for one picture over HTTP, save it, stop; returns the exit status."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise errors.ConfigError(f"{out} cannot be made ({exc.strerror}); give another --out.") from exc
    options = up.Options(config="glm_image_tiny", port=free_port(), model=str(tiny_model(say)))
    with up.running(options, say) as machine:
        machine.interruptible = True
        name = machine.pipe.served_model_names[0]
        say(f"asking   {name} for {prompt!r}, {size}")
        started = time.monotonic()
        body = {"model": name, "prompt": prompt, "size": size, "response_format": "b64_json", "seed": 42}
        answer = post(options.port, "/v1/images/generations", body)
        took_s = time.monotonic() - started
        path = out / (re.sub(r"[^A-Za-z0-9]+", "-", prompt).strip("-").lower()[:60] + ".png")
        path.write_bytes(base64.b64decode(answer["data"][0]["b64_json"]))
    shutil.rmtree(options.folder(), ignore_errors=True)  # logs of a run that went well, under a port drawn at random
    say(f"picture  {path.resolve()} ({size}, {took_s:.1f} s)")
    return 0


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def post(port: int, path: str, body: dict[str, Any], timeout_s: float = 600.0) -> dict[str, Any]:
    """POST JSON to the local router. Raises OmniqueueError with the server's message."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
    finally:
        connection.close()
    if response.status != 200:
        raise errors.OmniqueueError(f"The router answered {response.status}: {answer['error']['message']}")
    return answer
