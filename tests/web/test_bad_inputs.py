"""Some 600 bad inputs against the real router under gunicorn, one after another: each is told off at once and costs
nothing: no job, no message, no memory, and the next good request is served."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from omniqueue import catalog, store
from tests.unit.test_pictures import BAD as PICTURES
from tests.unit.test_pictures import bomb, encoded
from tests.web import support
from tests.web.test_server import Server, environment, free_port, serving

#: A second on a machine with nothing else to do; far more than that is an answer that hangs.
PATIENCE_S = 5.0
GROWTH_BYTES = 50e6
PIPELINES = ("fake_image", "fake_text", "fake_speech", "fake_video")
JSON = {"Content-Type": "application/json"}
#: A body that is served, for every route that takes JSON, and the field with the prompt.
ROUTES: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/images/generations": ({"prompt": "x"}, "prompt"),
    "/v1/jobs": ({"prompt": "x"}, "prompt"),
    "/v1/chat/completions": (
        {"model": "fake-text", "messages": [{"role": "user", "content": "x"}]},
        "messages",
    ),
    "/v1/audio/speech": ({"model": "fake-speech", "input": "x"}, "input"),
    "/v1/videos": ({"model": "fake-video", "prompt": "x"}, "prompt"),
    "/v1/videos/sync": ({"model": "fake-video", "prompt": "x"}, "prompt"),
}


@dataclass
class Bad:
    """One input, and the statuses that it may get."""

    what: str
    path: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"
    statuses: tuple[int, ...] = (400,)
    param: str | None = None


def _json(path: str, value: Any, what: str, statuses: tuple[int, ...] = (400,), param: str | None = None) -> Bad:
    return Bad(what, path, json.dumps(value).encode(), JSON, statuses=statuses, param=param)


def of_json(path: str) -> Iterator[Bad]:
    """What can be wrong with any JSON request."""
    good, prompt = ROUTES[path]
    text = json.dumps(good)
    raw = {
        "nothing": b"", "space": b" \n", "half": text[:-1].encode(), "trailing": (text + "x").encode(), "array": b"[]",
        "number": b"7", "null": b"null", "nan": b'{"seed": NaN}', "single quotes": text.replace('"', "'").encode(),
        "utf-16": text.encode("utf-16"), "bom": b"\xef\xbb\xbf" + text.encode(), "not utf-8": b'{"user": "\xff"}',
        "key twice": (text[:-1] + ', "user": "a", "user": "b"}').encode(), "deep": b"[" * 200_000,
        "deep object": b'{"a":' * 50_000, "digits": (text[:-1] + ', "seed": ' + "9" * 5000 + "}").encode(),
        "surrogate": (text[:-1] + ', "user": "\\ud800"}').encode(), "gzip": gzip.compress(text.encode()),
    }  # fmt: skip
    for what, body in raw.items():
        yield Bad(what, path, body, JSON)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonp", "image/png"):
        yield Bad(f"type {kind}", path, text.encode(), {"Content-Type": kind}, statuses=(415,))
    values: dict[str, list[Any]] = {
        prompt: [None, 7, True, {}, "", " ", "\u3000", [], [7], "a\0b"],
        "model": [7, [], "", "nope", "../../etc/passwd", "\0"],
        "seed": ["7", "７", -1, 2**63, 1.5, True, []],
        "user": [7, "u" * 300],
        "priority": [-1, 10, "1", True],
        "request_timeout_s": [0, -1, 1e9, "5"],
        "n" if "video" not in path and "speech" not in path else "num_inference_steps": [0, -1, "2", 10**30],
        "promt": ["x"], "__proto__": [{}], "a" * 200: [1],
    }  # fmt: skip
    for name, bad in values.items():
        for value in bad:
            statuses = (404,) if name == "model" and isinstance(value, str) else (400,)
            yield _json(path, {**good, name: value}, f"{name[:20]}={value!r:.20}", statuses)
    yield _json(path, {**good, "user": "a" * (1 << 20)}, "a megabyte", (413,))
    for key in ("", " ", "k" * 256, "a\u00e9b"):
        sent = {**JSON, "Idempotency-Key": key}
        yield Bad(f"key {key[:5]!r}", path, text.encode(), sent, param="Idempotency-Key")


def form(*parts: tuple[str, bytes, str | None], boundary: str = "b") -> tuple[bytes, dict[str, str]]:
    """A multipart body of (name, content, file name)."""
    lines = []
    for name, content, filename in parts:
        more = f'; filename="{filename}"' if filename is not None else ""
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
        lines.append(head.encode() + content + b"\r\n")
    body = b"".join(lines) + f"--{boundary}--\r\n".encode()
    return body, {"Content-Type": f"multipart/form-data; boundary={boundary}"}


PNG = encoded("RGB", (64, 64))
PROMPT = ("prompt", b"x", None)
IMAGE = ("image", PNG, "a.png")


def of_edits() -> Iterator[Bad]:
    """What can be wrong with pictures and forms."""
    path = "/v1/images/edits"

    def bad(what: str, *parts: tuple[str, bytes, str | None], status: int = 400, param: str | None = None) -> Bad:
        body, headers = form(*parts)
        return Bad(what, path, body, headers, statuses=(status,), param=param)

    for what, content in PICTURES.items():
        for name in ("image", "mask"):
            others = [IMAGE] if name == "mask" else []
            yield bad(f"{name}: {what}", PROMPT, *others, (name, content, "a.png"), param=name)
    yield bad("two that are too much together", PROMPT, *[("image", bomb(4096, 4000), "a")] * 2, param="image")
    yield bad("a mask of another size", PROMPT, IMAGE, ("mask", encoded("L", (8, 8)), "m"), param="mask")
    yield bad("a size that cannot be made", PROMPT, ("image", encoded("RGB", (63, 64)), "a"), param="size")
    yield bad("no picture", PROMPT, param="image")
    yield bad("five pictures", PROMPT, *[IMAGE] * 5, param="image")
    yield bad("a picture as text", PROMPT, ("image", b"/etc/passwd", None), param="image")
    yield bad("a prompt as a file", IMAGE, ("prompt", b"x", "prompt.txt"), param="prompt")
    yield bad("the prompt twice", PROMPT, PROMPT, IMAGE, param="prompt")
    yield bad("the mask twice", PROMPT, IMAGE, ("mask", PNG, "m"), ("mask", PNG, "m"), param="mask")
    yield bad("not utf-8", ("prompt", b"\xff", None), IMAGE, param="prompt")
    yield bad("a field of a megabyte", ("prompt", b"x" * (1 << 20), None), IMAGE, status=413)
    yield bad("a thousand fields", *[("a", b"x", None)] * 1000, status=413)
    yield bad("33 MB", PROMPT, ("image", b"x" * (33 << 20), "a.png"), status=413)
    for name, value in {
        "n": "２", "seed": "-1", "strength": "2", "guidance_scale": "nan", "stream": "true", "size": "６４x６４",
        "lora": "{}", "layers": "3", "response_format": "file", "input_fidelity": "high", "output_compression": "50",
        "url": "http://127.0.0.1/x", "url[]": "file:///etc/passwd", "model": "\0",
    }.items():  # fmt: skip
        status = 404 if name == "model" else 400
        yield bad(f"{name}={value}", PROMPT, IMAGE, (name, value.encode(), None), status=status)
    for name in ("../../etc/passwd", "/etc/passwd", "C:\\x", "a\0.png", "a" * 5000, ".."):
        yield bad(f"file name {name[:10]!r}", PROMPT, ("image", b"no picture", name), param="image")
    whole, headers = form(PROMPT, IMAGE)
    yield Bad("cut short", path, whole[:-20], headers)
    yield Bad("no boundary", path, whole, {"Content-Type": "multipart/form-data"})
    yield Bad("another boundary", path, whole, {"Content-Type": "multipart/form-data; boundary=c"})
    yield Bad("json", path, b"{}", JSON, statuses=(415,))


#: Names that must not lead anywhere.
NAMES = (
    "..", "../../../etc/passwd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "..%2f..%2fetc%2fpasswd", "..%5c..%5cx", "%00",
    "%ff%fe", "x%00.png", "%252e%252e%252f", "~root", "a" * 3000, "%0d%0aSet-Cookie:%20x", "file:%2f%2f%2fetc%2fpasswd",
    "0" * 32 + "-1-0.png", "{x}", "%e2%80%ae",
)  # fmt: skip


def of_paths() -> Iterator[Bad]:
    """What can be wrong with a path, a query or a method."""
    for place in ("/v1/files/", "/v1/jobs/", "/v1/models/", "/v1/videos/", "/page/"):
        for name in NAMES:
            yield Bad(f"name {name[:20]}", place + name, method="GET", statuses=(400, 404, 405))
    for query in (
        "limit=0",
        "limit=101",
        "limit=x",
        "limit=９",
        "limit=-1",
        "limit=1e1",
        "limit=1&limit=2",
        "limt=1",
        "status=failed",
        "limit=%00",
        "order=up",
        "after=x",
    ):
        yield Bad(query, f"/v1/jobs?{query}", method="GET")
    for method, path in (
        ("PUT", "/v1/jobs"),
        ("PATCH", "/v1/images/generations"),
        ("DELETE", "/v1/models"),
        ("TRACE", "/"),
    ):
        yield Bad(method, path, method=method, statuses=(405,))
    for host in ("a b", "x/../y", "a@b", "\xfc", "a" * 300):
        yield Bad(f"host {host[:5]}", "/v1/models", headers={"Host": host}, method="GET", param="Host")
    body = json.dumps({"prompt": "x"}).encode()
    yield Bad("another site", "/v1/jobs", body, {**JSON, "Sec-Fetch-Site": "cross-site"}, statuses=(403,))


TABLE = [*(bad for path in ROUTES for bad in of_json(path)), *of_edits(), *of_paths()]


@pytest.fixture(scope="module")
def running(valkey: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("bad"), free_port()
    command = [sys.executable, "-m", "web.server", "--bind", f"127.0.0.1:{port}"]
    shipped = Path(__file__).parents[2] / "stage_configs"
    paths = os.pathsep.join(str(shipped / f"{name}.yaml") for name in PIPELINES)
    environ = environment(valkey, folder, OMNIQUEUE_STAGE_CONFIGS_PATH=paths)
    with serving(command, environ, folder / "log", port) as made:
        yield made


def send(server: Server, bad: Bad) -> tuple[int, str, bytes]:
    """Status, content type and body; everything goes out as it is."""
    body = bad.body or b""
    headers = {"Host": "localhost", "Connection": "close", "Content-Length": str(len(body)), **bad.headers}
    lines = [f"{bad.method} {bad.path} HTTP/1.1".encode()]
    lines += [f"{name}: ".encode() + value.encode("latin-1") for name, value in headers.items()]
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=PATIENCE_S) as connection:
        with contextlib.suppress(ConnectionError):  # told before all of it was sent
            connection.sendall(b"\r\n".join([*lines, b"", body]))
        answer = http.client.HTTPResponse(connection, method=bad.method)
        answer.begin()
        return answer.status, answer.getheader("Content-Type") or "", answer.read()


def jobs(records: store.Store) -> set[str]:
    return set(records.client.scan_iter(f"{records.namespace}:job:*", count=1000))


def messages(records: store.Store, known: catalog.Catalog) -> int:
    lists = [stage.queue for pipe in known.pipelines for stage in pipe.stages]
    return sum(int(records.client.llen(name)) for name in lists)  # type: ignore[arg-type]


def resident(server: Server) -> int:
    return sum(int(process.memory_info().rss) for process in server.family())


def documented(document: dict[str, Any], bad: Bad) -> set[str] | None:
    """The statuses that the document tells of for this input's operation; None where it is of no operation."""
    path = bad.path.partition("?")[0]
    for template, methods in document["paths"].items():
        if bad.method.lower() in methods and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), path):
            return set(methods[bad.method.lower()]["responses"])
    return None


def test_the_table_is_long_and_every_entry_of_it_another() -> None:
    names = [(bad.method, bad.path, bad.what) for bad in TABLE]
    assert len(names) == len(set(names))
    assert len(names) > 300


def test_bad_inputs_are_told_off_and_cost_nothing(running: Server) -> None:
    router, known = running.router(), catalog.load(running.config)
    good = Bad("good", "/v1/images/generations", b'{"prompt": "x", "size": "16x16"}', JSON)
    body, headers = form(PROMPT, IMAGE)
    edit = Bad("edit", "/v1/images/edits", body, headers)
    with support.Workers(router):
        for _ in range(5):  # whatever is loaded at first use is loaded
            assert (send(running, good)[0], send(running, edit)[0]) == (200, 200)
        document = json.loads(send(running, Bad("", "/openapi.json", method="GET"))[2])
        before, wrong, slowest = resident(running), [], 0.0
        for number, bad in enumerate(TABLE):
            known_jobs, waiting = jobs(router.store), messages(router.store, known)
            began = time.monotonic()
            status, kind, content = send(running, bad)
            slowest = max(slowest, time.monotonic() - began)
            if problem := complaint(bad, status, kind, content, documented(document, bad)):
                wrong.append((bad.method, bad.path[:60], bad.what, problem))
            if jobs(router.store) - known_jobs or messages(router.store, known) != waiting:
                wrong.append((bad.method, bad.path[:60], bad.what, "something was enqueued"))
            if number % 10 == 0 and send(running, good)[0] != 200:
                wrong.append((bad.method, bad.path[:60], bad.what, "the next good request failed"))
        assert wrong == [], "\n".join(map(str, wrong))
        assert slowest < PATIENCE_S
        assert send(running, edit)[0] == 200
        assert resident(running) - before < GROWTH_BYTES
    assert "Traceback" not in running.log.read_text()
    assert all(psutil.pid_exists(process.pid) for process in running.family())


def complaint(bad: Bad, status: int, kind: str, content: bytes, told: set[str] | None) -> str | None:
    """What is wrong with an answer; None when nothing is."""
    if status not in bad.statuses:
        return f"{status}: {content[:200]!r}"
    if told is not None and str(status) not in told:
        return f"{status} is not documented"
    if kind != "application/json":
        return f"it is {kind}"
    error = json.loads(content)["error"]
    if set(error) != {"message", "type", "param", "code"} or not error["message"]:
        return f"no error of ours: {error}"
    if bad.param is not None and error["param"] != bad.param:
        return f"param is {error['param']}, not {bad.param}"
    return "a traceback" if "Traceback" in error["message"] else None
