"""``omniqueue demo``: everything from nothing to a picture on disk, and down again."""

from __future__ import annotations

import base64
import http.client
import json
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omniqueue import errors, pictures, terminal, up

Say = Callable[[str], None]


#: The trained checkpoint, which a clone holds.
CHECKPOINT = Path(__file__).resolve().parents[1] / "examples" / "tiny_glm_image" / "checkpoint"


def tiny_model() -> Path:
    """The folder of the tiny GLM-Image. Raises ConfigError where omniqueue was installed without its repository."""
    if not (CHECKPOINT / "model_index.json").exists():
        raise errors.ConfigError(
            f"{CHECKPOINT} is not there: run this from a clone of the repository, or name a --model."
        )
    return CHECKPOINT


def run(prompt: str, size: str, out: Path, say: Say) -> int:
    """Start, ask for one picture over HTTP, save it, stop; returns the exit status."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise errors.ConfigError(f"{out} cannot be made ({exc.strerror}); give another --out.") from exc
    began = time.monotonic()
    options = up.Options(config="glm_image_tiny", port=free_port(), model=str(tiny_model()))
    with up.running(options, say) as machine:
        machine.interruptible = True
        say(f"started  in {time.monotonic() - began:.0f} s")
        name = machine.pipe.served_model_names[0]
        say(f"asking   {name} for {prompt!r}, {size}")
        started = time.monotonic()
        body = {"model": name, "prompt": prompt, "size": size, "response_format": "b64_json", "seed": 42}
        answer = post(options.port, "/v1/images/generations", body)
        took_s = time.monotonic() - started
        path = out / (re.sub(r"[^A-Za-z0-9]+", "-", prompt).strip("-").lower()[:60] + ".png")
        content = base64.b64decode(answer["data"][0]["b64_json"])
        path.write_bytes(content)
    shutil.rmtree(options.folder(), ignore_errors=True)  # logs of a run that went well, under a port drawn at random
    if terminal.shows_pictures(sys.stdout):
        print(*terminal.picture_lines(pictures.decode(content, "picture")), sep="\n")
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
