"""Media that a request names by URL: the only place that opens an address from a client.

Off unless the configuration names hosts. Then a name is resolved once, every address it has must be a public one, and
the connection is made to the address that was checked, so that a name which changes its mind gains nothing. Redirects
are followed a few times, each through the same checks.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from urllib.parse import SplitResult, urljoin, urlsplit

from omniqueue import errors

#: From the first look at a URL to its last byte, redirects included, in seconds.
DEADLINE_S = 15.0
#: How long the other side may be silent, in seconds.
SILENCE_S = 5.0
MAX_REDIRECTS = 3
#: Where media are served; other ports are other services.
PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK_BYTES = 64 * 1024
_DATA = re.compile(r"data:[a-z0-9.+/-]{0,100};base64,", re.IGNORECASE)
#: IPv6 addresses that stand for an IPv4 one in their last four bytes.
_TRANSLATED = [ipaddress.ip_network(net) for net in ("64:ff9b::/96", "::/96", "::ffff:0:0:0/96")]
#: The system's resolver takes no time limit, so it is asked on a thread that can be left behind.
_RESOLVERS = ThreadPoolExecutor(4, thread_name_prefix="resolve")


class Unavailable(errors.InvalidRequest):
    """The media of a URL could not be had from its server."""

    status = 424
    code = "media_unavailable"


def fetch(url: str, hosts: Sequence[str], param: str, max_bytes: int) -> bytes:
    """The bytes behind a URL of a request: ``data:``, or http(s) where ``hosts`` allow it.

    Raises InvalidRequest for what is not allowed, PayloadTooLarge, and Unavailable when the server does not deliver.
    """
    if url[:5].lower() == "data:":
        return _data(url, param)
    if not hosts:
        raise errors.InvalidRequest(
            f"{param}: this server opens no URLs (OMNIQUEUE_ALLOW_REMOTE_MEDIA); send the file itself.", param=param
        )
    deadline = time.monotonic() + DEADLINE_S
    for _ in range(MAX_REDIRECTS + 1):
        parts = _checked(url, hosts, param)
        port = parts.port or PORTS[parts.scheme]
        address = _address(str(parts.hostname), port, param, deadline)
        try:
            with _answer(parts, port, address, deadline) as answer:
                if answer.status not in _REDIRECTS:
                    return _content(answer, param, max_bytes, deadline)
                url = urljoin(url, answer.getheader("Location") or "")
        except (OSError, http.client.HTTPException, ValueError) as exc:
            reason = str(exc).strip(".") or type(exc).__name__
            raise Unavailable(f"{param}: {parts.hostname} did not deliver: {reason[:200]}.", param=param) from None
    raise Unavailable(f"{param}: more than {MAX_REDIRECTS} redirects.", param=param)


def _data(url: str, param: str) -> bytes:
    match = _DATA.match(url)
    try:
        if match is None:
            raise ValueError
        return base64.b64decode(url[match.end() :], validate=True)
    except (ValueError, binascii.Error):
        text = f"{param} must be a base64 data URL, such as data:image/png;base64,..."
        raise errors.InvalidRequest(text, param=param) from None


def _checked(url: str, hosts: Sequence[str], param: str) -> SplitResult:
    """The parts of a URL that may be looked up. Raises InvalidRequest."""
    bad = errors.InvalidRequest(f"{param} must be a plain http or https URL.", param=param)
    if not re.fullmatch(r"[!-\[\]-~]+", url):  # printable ASCII without a backslash
        raise bad
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise bad from None
    host = (parts.hostname or "").rstrip(".")
    if parts.scheme not in PORTS or not host or parts.username is not None or parts.password is not None:
        raise bad
    if not any(_matches(host, allowed) for allowed in hosts):
        raise errors.InvalidRequest(f"{param}: this server opens no URLs of {host[:200]!r}.", param=param)
    if port is not None and port not in PORTS.values():
        raise errors.InvalidRequest(f"{param}: this server opens no URLs with port {port}.", param=param)
    return parts


def _matches(host: str, allowed: str) -> bool:
    return allowed in ("*", host) or (allowed.startswith("*.") and host.endswith(allowed[1:]))


def _address(host: str, port: int, param: str, deadline: float) -> str:
    """One address of the host, all of which must be public. Raises InvalidRequest, Unavailable."""
    try:
        found = _RESOLVERS.submit(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM).result(_left(deadline))
    except (OSError, UnicodeError, FutureTimeout, TimeoutError):
        raise Unavailable(f"{param}: {host[:200]} cannot be looked up.", param=param) from None
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses or not all(is_public(address) for address in addresses):
        raise errors.InvalidRequest(f"{param}: {host[:200]} is not a public address.", param=param)
    return addresses[0]


def is_public(text: str) -> bool:
    """Whether an address is one of the open internet, however it is written."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if any(address in net for net in _TRANSLATED):
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if not all(is_public(str(one)) for one in inner if one is not None):
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved and not address.is_unspecified


@contextlib.contextmanager
def _answer(parts: SplitResult, port: int, address: str, deadline: float) -> Iterator[http.client.HTTPResponse]:
    """The answer to a GET, from exactly this address."""
    connection = http.client.HTTPConnection(str(parts.hostname), port)
    link = socket.create_connection((address, port), min(SILENCE_S, _left(deadline)))
    # Ends even a server that sends a byte now and then: whatever waits for the socket then fails.
    timer = threading.Timer(_left(deadline), _cut, (link,))
    timer.daemon = True
    timer.start()
    try:
        if parts.scheme == "https":
            link = ssl.create_default_context().wrap_socket(link, server_hostname=parts.hostname)
        link.settimeout(SILENCE_S)
        connection.sock = link
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", target, headers={"Accept-Encoding": "identity", "User-Agent": "omniqueue"})
        with connection.getresponse() as answer:
            yield answer
    finally:
        timer.cancel()
        connection.close()
        link.close()


def _cut(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def _content(answer: http.client.HTTPResponse, param: str, max_bytes: int, deadline: float) -> bytes:
    if answer.status != 200:
        raise ValueError(f"it answered {answer.status}")
    if answer.getheader("Content-Encoding", "identity") != "identity":
        raise ValueError("it answered with an encoding that was not asked for")
    content = bytearray()
    while chunk := answer.read1(_CHUNK_BYTES):
        content += chunk
        if len(content) > max_bytes:
            raise errors.PayloadTooLarge(f"{param} is larger than {max_bytes:,} bytes.", param=param)
    if answer.length:
        raise ValueError("it ended early")
    _left(deadline)  # a connection that was cut looks like one that ended
    return bytes(content)


def _left(deadline: float) -> float:
    """Seconds until the deadline. Raises TimeoutError when there are none."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("it took too long")
    return left_s
