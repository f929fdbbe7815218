"""API keys, the rate of one key, and what stands before every route."""

from __future__ import annotations

import base64
import re
import time
from pathlib import Path
from typing import Any

import pytest

from omniqueue import errors, settings
from tests.web import support
from tests.web.support import PROMPT, Router, error_of
from web import keys

KEY = "sk-one"


def basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "keys").write_text("# ours\n\n  sk-file \n")
    return tmp_path


@pytest.fixture
def locked(valkey: str, folder: Path) -> Any:
    options = {"api_keys": (KEY, "sk-twö"), "api_keys_file": str(folder / "keys")}
    with support.running(valkey, folder, support.pipeline(), **options) as router, support.Workers(router):
        yield router


def routes(router: Router) -> list[tuple[str, str]]:
    return [
        (method, re.sub(r"<[^>]+>", "x", rule.rule))
        for rule in router.application.url_map.iter_rules()
        for method in rule.methods or ()
    ]


def test_every_route_but_health_asks_for_a_key(locked: Router) -> None:
    assert len(routes(locked)) > 20
    for method, path in [*routes(locked), ("GET", "/nothing"), ("PUT", "/health/"), ("GET", "/health/x")]:
        if path == "/health" and method in ("GET", "HEAD", "OPTIONS"):
            assert locked.client.open(path, method=method).status_code == 200
        elif method != "HEAD":
            error = error_of(locked.client.open(path, method=method), 401)
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert not locked.enqueued()


def test_a_401_makes_a_browser_ask(locked: Router) -> None:
    assert locked.client.get("/v1/models").headers["WWW-Authenticate"].startswith("Basic realm=")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": KEY},
        {"Authorization": f"Token {KEY}"},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic !!!"},
        {"Authorization": "Basic " + base64.b64encode(b"\xff:\xff").decode()},
        {"X-Api-Key": KEY},
        bearer(""),
        bearer("sk-on"),
        bearer("sk-onee"),
        bearer("SK-ONE"),
        bearer("# ours"),
        bearer(f"{KEY},sk-file"),
        basic(""),
        basic("sk-on"),
    ],
)
def test_a_wrong_key_is_401(locked: Router, headers: dict[str, str]) -> None:
    error_of(locked.client.get("/v1/models", headers=headers), 401)


@pytest.mark.parametrize("headers", [bearer(KEY), bearer(f" {KEY} "), basic(KEY), bearer("sk-file"), basic("sk-twö")])
def test_a_right_key_is_served(locked: Router, headers: dict[str, str]) -> None:
    assert locked.client.get("/v1/models", headers=headers).status_code == 200
    assert locked.post(headers=headers).status_code == 200


def test_the_document_says_that_a_key_is_needed(locked: Router, idle_router: Router) -> None:
    made: dict[str, Any] = locked.client.get("/openapi.json", headers=bearer(KEY)).json
    assert made["components"]["securitySchemes"].keys() == {"bearer", "basic"}
    assert made["security"]
    for path, methods in made["paths"].items():
        for operation in methods.values():
            assert ("401" in operation["responses"]) == (path != "/health")
    assert "security" not in idle_router.client.get("/openapi.json").json


def test_a_key_is_in_no_message_and_no_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KEY not in repr(settings.Settings(api_keys=(KEY,)))
    with pytest.raises(errors.ConfigError) as caught:
        settings.load({"OMNIQUEUE_API_KEYS": ", ,"})
    assert "OMNIQUEUE_API_KEYS='***'" in caught.value.message


@pytest.mark.parametrize("content", [b"", b"# none\n\n", b"\xff\xfe"])
def test_a_key_file_without_a_key_does_not_open_the_door(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(errors.ConfigError, match="OMNIQUEUE_API_KEYS_FILE"):
        keys.Keys.load(settings.Settings(api_keys_file=str(tmp_path / "keys")))


def test_a_key_file_that_is_missing_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="cannot be read"):
        keys.Keys.load(settings.Settings(api_keys=(KEY,), api_keys_file=str(tmp_path / "none")))


# -- rate --------------------------------------------------------------------------------------------------------------


def test_a_key_that_sends_too_much_is_told_when_to_come_back(valkey: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"api_keys": (KEY, "sk-two"), "rate_limit": "3/minute"}
    with support.running(valkey, tmp_path, support.pipeline(), **options) as router, support.Workers(router):
        assert [router.post(headers=bearer(KEY)).status_code for _ in range(3)] == [200] * 3
        before = len(router.enqueued())
        response = router.post(headers=bearer(KEY))
        error = error_of(response, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert 50 <= int(response.headers["Retry-After"]) <= 60
        assert len(router.enqueued()) == before
        assert router.post(headers=basic(KEY)).status_code == 429  # the same key, said in another way
        assert router.post(headers=bearer("sk-two")).status_code == 200
        assert router.client.get("/v1/queues", headers=bearer(KEY)).status_code == 200  # looking costs nothing


def test_the_count_is_shared_by_all_routers_and_the_window_moves(valkey: str, tmp_path: Path) -> None:
    pipe = support.pipeline()
    routers = [support.running(valkey, tmp_path, pipe, rate_limit="2/second") for _ in range(2)]
    with routers[0] as one, routers[1] as other, support.Workers(one):
        deadline = time.monotonic() + 20
        while True:  # three within one second, on however slow a machine
            answers = [router.client.post("/v1/jobs", json={"prompt": PROMPT}) for router in (one, other, one)]
            if answers[2].status_code == 429:
                break
            assert time.monotonic() < deadline
        time.sleep(int(answers[2].headers["Retry-After"]))
        assert other.client.post("/v1/jobs", json={"prompt": PROMPT}).status_code == 202


def test_without_redis_a_rate_is_503_and_not_a_crash(tmp_path: Path) -> None:
    where = f"unix://{tmp_path}/nothing.sock"
    with support.running(where, tmp_path, support.pipeline(), rate_limit="1/second") as router:
        assert error_of(router.post(), 503)["code"] == "broker_unavailable"


# -- hosts, other sites, headers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    ["", " ", "a b", "a/../b", "evil.example/x?", "a@b", "a\\b", "a#b", "ü", "[::1", "a:b", "a:123456", '"', "a,b"],
)
def test_an_odd_host_is_refused_since_urls_are_made_of_it(idle_router: Router, host: str) -> None:
    response = idle_router.client.get("/v1/models", environ_overrides={"HTTP_HOST": host})
    assert error_of(response, 400)["param"] == "Host"


@pytest.mark.parametrize("host", ["localhost", "10.0.0.1:8000", "[::1]:8000", "a-b.example", "my_service:80"])
def test_a_plain_host_is_served(idle_router: Router, host: str) -> None:
    assert idle_router.client.get("/v1/models", environ_overrides={"HTTP_HOST": host}).status_code == 200


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
)
def test_a_page_of_another_site_cannot_send_requests(router: Router, site: str, status: int) -> None:
    assert router.post(headers={"Sec-Fetch-Site": site}).status_code == status
    assert router.client.get("/v1/models", headers={"Sec-Fetch-Site": site}).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost", 200),
        ("http://evil.example", 403),
        ("http://localhost:81", 403),
        ("null", 403),
        ("http://[", 403),
    ],
)
def test_without_that_header_the_origin_tells(router: Router, origin: str, status: int) -> None:
    assert router.post(headers={"Origin": origin}).status_code == status


def test_every_answer_forbids_guessing_and_pages_have_a_policy(idle_router: Router) -> None:
    for path in ("/docs", "/v1/models", "/nothing"):
        headers = idle_router.client.get(path).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert "Access-Control-Allow-Origin" not in headers
    policy = idle_router.client.get("/docs").headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
