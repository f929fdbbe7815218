"""URLs from clients: nothing but an allowed, public address is ever connected to, and that not for long."""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from omniqueue import errors, remote

ANY = ("*",)
MAX_BYTES = 100_000

PRIVATE = [
    "127.0.0.1", "127.1", "127.255.255.254", "2130706433", "0x7f000001", "0x7f.1", "017700000001", "0177.0.0.1",
    "0", "0.0.0.0", "localhost", "LOCALHOST", "localhost.", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1",
    "169.254.169.254", "169.254.1.1", "2852039166", "0xa9fea9fe", "224.0.0.1", "255.255.255.255", "240.0.0.1",
    "192.0.2.1", "198.18.0.1", "[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]",
    "[::127.0.0.1]", "[fe80::1]", "[fe80::1%25lo]", "[fc00::1]", "[fd00::1]", "[ff02::1]", "[2002:7f00:1::]",
    "[64:ff9b::7f00:1]", "[64:ff9b::169.254.169.254]", "[2001:db8::1]", "[2001:0:7f00:1::]", "[::ffff:0:127.0.0.1]",
]  # fmt: skip

MALFORMED = [
    "", " ", "x", "//host/x", "http:", "http://", "http:///x", "http://:80/", "ftp://host/x", "file:///etc/passwd",
    "gopher://host/", "javascript:1", "HTTP//host", "http://user@host/", "http://user:word@host/", "http://@127.0.0.1/",
    "http://host@127.0.0.1/", "http://127.0.0.1\\@host/", "http://ho st/", "http://host/a b", "http://host/\r\nX: y",
    "http://host/\0", "http://hóst/", "http://１２７.0.0.1/", "http://host:port/", "http://host:-1/", "http://host:99999/",
    "http://[::1/", "http://[::1]x/", "\thttp://host/", "http://host/\ud800", "data:", "data:,x",
    "data:image/png,abc", "data:image/png;base64,@@@@", "data:image/png;base64,abc", "data:;charset=utf-8,x",
    "/etc/passwd", "../../etc/passwd", "s3://bucket/key", "redis://127.0.0.1:6379/0", "unix:///run/x.sock",
]  # fmt: skip


class Canary:
    """A listener on every address of this machine that counts who connects, and answers as told."""

    def __init__(self, answer: Callable[[socket.socket], None] | None = None) -> None:
        self.connections = 0
        self._answer = answer
        self._server = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        self._server.settimeout(0.1)
        self.port = int(self._server.getsockname()[1])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            self.connections += 1
            with connection:
                connection.settimeout(5)
                if self._answer is not None:
                    try:
                        connection.recv(65536)
                        self._answer(connection)
                    except OSError:
                        pass

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(20)
        self._server.close()


@pytest.fixture(scope="module")
def listener() -> Iterator[Canary]:
    made = Canary()
    yield made
    made.stop()


@pytest.fixture
def canary(listener: Canary, monkeypatch: pytest.MonkeyPatch) -> Canary:
    """Listens where a fetch without a port would go."""
    monkeypatch.setattr(remote, "PORTS", {"http": listener.port, "https": listener.port})
    listener.connections = 0
    return listener


@pytest.mark.parametrize("host", PRIVATE)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_no_spelling_of_a_private_address_is_connected_to(canary: Canary, host: str, scheme: str) -> None:
    for url in (f"{scheme}://{host}/x.png", f"{scheme}://{host}:{canary.port}/x.png"):
        with pytest.raises(errors.InvalidRequest) as caught:
            remote.fetch(url, ANY, "url", MAX_BYTES)
        assert caught.value.status in (400, 424)
        assert caught.value.param == "url"
    assert canary.connections == 0


def test_the_canary_would_have_sung(canary: Canary) -> None:
    socket.create_connection(("127.0.0.1", canary.port), timeout=5).close()
    socket.create_connection(("::1", canary.port), timeout=5).close()
    deadline = time.monotonic() + 5
    while canary.connections < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("url", MALFORMED)
def test_what_is_no_plain_url_is_refused(canary: Canary, url: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        remote.fetch(url, ANY, "url", MAX_BYTES)
    assert caught.value.status == 400
    assert canary.connections == 0


@pytest.mark.parametrize("url", ["http://example.org/x.png", "https://127.0.0.1/", "not a url"])
def test_without_hosts_nothing_is_even_looked_up(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)
    with pytest.raises(errors.InvalidRequest, match="OMNIQUEUE_ALLOW_REMOTE_MEDIA"):
        remote.fetch(url, (), "url", MAX_BYTES)


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[Any]:
    asked: list[Any] = []

    def resolve(host: str, port: int, *_: Any, **__: Any) -> Any:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return asked


@pytest.mark.parametrize("addresses", [(), ("8.8.8.8", "127.0.0.1"), ("::1",), ("10.0.0.1", "8.8.8.8")])
def test_a_name_with_any_private_address_is_refused(
    canary: Canary, monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...]
) -> None:
    resolving(monkeypatch, *addresses)
    with pytest.raises(errors.InvalidRequest, match="not a public address"):
        remote.fetch("http://pictures.example/x", ANY, "url", MAX_BYTES)
    assert canary.connections == 0


def test_a_name_that_cannot_be_looked_up_is_424(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(remote.Unavailable, match=r"nowhere\.invalid cannot be looked up"):
        remote.fetch("http://nowhere.invalid/x", ANY, "url", MAX_BYTES)


def test_a_resolver_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(remote, "DEADLINE_S", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: let_go.wait(10))
    try:
        with pytest.raises(remote.Unavailable):
            remote.fetch("http://slow.example/x", ANY, "url", MAX_BYTES)
    finally:
        let_go.set()


@pytest.mark.parametrize(
    ("hosts", "host", "allowed"),
    [
        (("media.example",), "media.example", True),
        (("media.example",), "MEDIA.example", True),
        (("media.example",), "media.example.", True),
        (("media.example",), "x.media.example", False),
        (("media.example",), "media.example.evil.test", False),
        (("media.example",), "evilmedia.example", False),
        (("*.example",), "a.b.example", True),
        (("*.example",), "example", False),
        (("*.example",), "badexample", False),
        (("a.test", "b.test"), "b.test", True),
    ],
)
def test_only_named_hosts_are_opened(
    monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, ...], host: str, allowed: bool
) -> None:
    asked = resolving(monkeypatch)
    with pytest.raises(errors.InvalidRequest):
        remote.fetch(f"http://{host}/x", hosts, "url", MAX_BYTES)
    assert bool(asked) == allowed


@pytest.mark.parametrize("port", [22, 25, 6379, 8000, 65535])
def test_other_ports_are_other_services(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    asked = resolving(monkeypatch, "8.8.8.8")
    with pytest.raises(errors.InvalidRequest, match=f"port {port}"):
        remote.fetch(f"http://media.example:{port}/x", ANY, "url", MAX_BYTES)
    assert not asked


# -- what an allowed server may do -------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Canary]]:
    """Makes a server whose address counts as public."""
    made: list[Canary] = []

    def make(answer: bytes | Callable[[socket.socket], None]) -> Canary:
        canary = Canary(answer if callable(answer) else lambda connection: connection.sendall(answer))
        made.append(canary)
        monkeypatch.setattr(remote, "PORTS", {"http": canary.port, "https": canary.port})
        monkeypatch.setattr(remote, "is_public", lambda address: True)
        resolving(monkeypatch, "127.0.0.1")
        return canary

    yield make
    for canary in made:
        canary.stop()


def whole(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def test_a_file_is_fetched_from_the_checked_address_under_its_name(server: Any) -> None:
    seen: list[Any] = []
    canary = server(whole(b"picture"))
    original = socket.create_connection

    def record(address: Any, *arguments: Any, **options: Any) -> socket.socket:
        seen.append(address)
        return original(address, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", record)
        assert remote.fetch("http://media.example/a?b=c", ANY, "url", MAX_BYTES) == b"picture"
    assert seen == [("127.0.0.1", canary.port)]


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"nonsense", b"HTTP/1.1 200 OK\r\n\r\n"[:10], whole(b"", status="404 Not Found"),
        whole(b"", status="500 No"), whole(b"x", "Content-Encoding: gzip"), whole(b"abc")[:-1],
        whole(b"", "Location: http://media.example/again", status="302 Found"),
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n", b"HTTP/1.1 200 OK\r\nA: " + b"b" * 70_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)  # fmt: skip
def test_a_server_that_does_not_deliver_is_424(server: Any, answer: bytes) -> None:
    server(answer)
    with pytest.raises(remote.Unavailable) as caught:
        remote.fetch("http://media.example/x", ANY, "url", MAX_BYTES)
    assert caught.value.status == 424


def test_a_redirect_goes_through_the_same_checks(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ("http://127.0.0.1/", "http://[::1]/", "https://2130706433/", "file:///etc/passwd", "//10.0.0.1/x"):
        canary = server(whole(b"", f"Location: {where}", status="302 Found"))
        monkeypatch.setattr(remote, "is_public", lambda address, first=[True]: bool(first) and first.pop())
        with pytest.raises(errors.InvalidRequest) as caught:
            remote.fetch("http://media.example/x", ANY, "url", MAX_BYTES)
        assert caught.value.status == 400
        assert canary.connections == 1


def test_a_redirect_away_from_the_named_hosts_is_refused(server: Any) -> None:
    canary = server(whole(b"", "Location: http://other.example/x", status="301 Moved"))
    with pytest.raises(errors.InvalidRequest, match=r"other\.example"):
        remote.fetch("http://media.example/x", ("media.example",), "url", MAX_BYTES)
    assert canary.connections == 1


def test_a_file_that_is_too_large_is_not_read_to_its_end(server: Any) -> None:
    def endless(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(1000):
            connection.sendall(b"x" * 65536)

    server(endless)
    with pytest.raises(errors.PayloadTooLarge) as caught:
        remote.fetch("http://media.example/x", ANY, "url", MAX_BYTES)
    assert (caught.value.status, caught.value.param) == (413, "url")


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b"HTTP/1.1 200 OK\r\nA: "])
def test_a_server_that_drips_is_cut_off(server: Any, monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(head)
        for _ in range(600):
            connection.sendall(b"x")
            time.sleep(0.05)

    monkeypatch.setattr(remote, "DEADLINE_S", 0.5)
    server(drip)
    began = time.monotonic()
    with pytest.raises(remote.Unavailable):
        remote.fetch("http://media.example/x", ANY, "url", MAX_BYTES)
    assert time.monotonic() - began < 20


def test_a_data_url_needs_no_network_and_no_permission() -> None:
    content = base64.b64encode(b"picture").decode()
    assert remote.fetch(f"data:image/png;base64,{content}", (), "url", MAX_BYTES) == b"picture"


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2a00:1450:4001::200e"])
def test_public_addresses_are_public(address: str) -> None:
    assert remote.is_public(address)
