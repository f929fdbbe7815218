"""Whatever is wrong with a request is a 4xx that names the field, before anything is enqueued."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.web import support
from tests.web.support import GENERATIONS, PROMPT, Router, error_of


@pytest.fixture(scope="module")
def shared(valkey: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    with support.running(valkey, Path(tmp_path_factory.mktemp("web")), support.pipeline()) as router:
        yield router


@pytest.fixture
def refusing(shared: Router) -> Iterator[Router]:
    """A router that must not have enqueued anything when the test ends."""
    yield shared
    assert not shared.enqueued()


SIZES = [
    "0x64",
    "64x0",
    "64X64",
    " 64x64",
    "64x64 ",
    "64x64\n",
    "６４x６４",
    "٦٤x٦٤",
    "064x64",
    "64x064",
    "65x64",
    "64x63",
    "99999x99999",
    "9999999x64",
    "64x",
    "x64",
    "64",
    "",
    "-64x64",
    "64x-64",
    "+64x64",
    "64x64x64",
    "64×64",
    "64.0x64",
    "6_4x64",
    "1e2x64",
    "AUTO",
    "8x8",
    "2048x64",
    "64x64\0",
]


def each(field: str, *values: Any) -> list[tuple[str, Any]]:
    return [(field, value) for value in values]


FIELDS: list[tuple[str, Any]] = [
    *each("prompt", "", " ", "\t\n", "\u3000", "\u00a0", None, 7, True, [], ["a"], {}, "a\0b"),
    ("prompt", "a" * 32_769),
    *each("n", 0, -1, True, "2", 2.0, 11, [], {}, 10**30, 1.5),
    *each("size", *SIZES, 64, ["64x64"], {"w": 64}, True),
    *each("seed", -1, 2**63, 2**63 - 1, 10**40, "x", "1", 1.0, True, []),
    *each("num_inference_steps", 0, -1, 51, 10**9, True, "5", 2.5, [], 10**30),
    *each("guidance_scale", -0.1, 20.1, "5", True, [], 10**400, 1e308),
    *each("negative_prompt", 7, [], True, "a\0b", "a" * 32_769),
    *each("model", 7, [], True),
    *each("response_format", "file", "URL", "", 1, ["url"]),
    *each("output_format", "gif", "PNG", "jpg", "", 1, "webm"),
    *each("output_compression", -1, 101, 50, "80", 80.5, True),
    *each("user", 7, [], "u" * 257),
    *each("request_timeout_s", 0, -1, 1e9, "5", True),
    *each("priority", -1, 10, "1", True, 1.0),
    *each("quality", "hd", "high", 1, True),
    *each("background", "transparent", 1),
    *each("moderation", "high", False),
    *each("style", "vivid", "natural", 1),
    *each("stream", True, 1, "true"),
    *each("partial_images", 1, True, "0"),
    *[(name, 1) for name in ("foo", "Prompt", "promt", "n ", "", "a.b", "ü", "extra_body", "__proto__")],
]


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=lambda value: repr(value)[:40])
def test_a_bad_field_is_refused_by_name(refusing: Router, field: str, value: Any) -> None:
    error = error_of(refusing.post(json={"prompt": PROMPT, field: value}), 400)
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert field in error["message"]


@pytest.mark.parametrize(("field", "value"), FIELDS, ids=lambda value: repr(value)[:40])
def test_a_job_refuses_the_same(refusing: Router, field: str, value: Any) -> None:
    error = error_of(refusing.post("/v1/jobs", json={"prompt": PROMPT, field: value}), 400)
    assert error["param"] == field


@pytest.mark.parametrize("kind", ["video", "", 1, ["image"]])
def test_a_job_of_an_unknown_type_is_refused(refusing: Router, kind: Any) -> None:
    assert error_of(refusing.post("/v1/jobs", json={"prompt": PROMPT, "type": kind}), 400)["param"] == "type"


def test_a_missing_prompt_is_named(refusing: Router) -> None:
    assert error_of(refusing.post(json={"n": 1}), 400)["param"] == "prompt"


@pytest.mark.parametrize("name", ["nope", "", "../x", "a" * 5000, "ü"])
def test_an_unknown_model_is_404_and_the_known_ones_are_listed(refusing: Router, name: str) -> None:
    error = error_of(refusing.post(json={"prompt": PROMPT, "model": name}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert refusing.pipe.name in error["message"]


def test_an_unknown_field_comes_with_the_nearest_right_name(refusing: Router) -> None:
    error = error_of(refusing.post(json={"prompt": PROMPT, "guidance": 2}), 400)
    assert "guidance_scale" in error["message"]


def test_messages_say_what_a_field_may_be(refusing: Router) -> None:
    expected = {
        "n": ("2", "n must be a whole number, not a string."),
        "num_inference_steps": (0, "num_inference_steps must be at least 1."),
        "guidance_scale": (21, "guidance_scale must be at most 20.0."),
        "output_format": ("gif", "output_format must be 'png' or 'jpeg' or 'webp' here; it is 'gif'."),
        "style": ("vivid", "style cannot be honoured here; leave it out."),
        "size": ("65x64", "size 65x64: width and height must be multiples of 16."),
        "user": ("u" * 300, "user must be of length at most 256."),
        "stream": ("yes", "stream must be true or false, not a string."),
    }
    for field, (value, message) in expected.items():
        assert error_of(refusing.post(json={"prompt": PROMPT, field: value}), 400)["message"] == message


BODIES: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b" \n", None),
    (b"{", None),
    (b'{"prompt": "x",}', None),
    (b"{'prompt': 'x'}", None),
    (b'{"prompt": "x"} trailing', None),
    (b'{"prompt": "\xff"}', None),
    (b'\xef\xbb\xbf{"prompt": "x"}', None),
    ('{"prompt": "x"}'.encode("utf-16"), None),
    (b"[]", None),
    (b'["prompt"]', None),
    (b'"prompt"', None),
    (b"7", None),
    (b"null", None),
    (b"NaN", None),
    (b'{"prompt": "x", "guidance_scale": NaN}', None),
    (b'{"prompt": "x", "guidance_scale": Infinity}', None),
    (b'{"prompt": "x", "guidance_scale": -Infinity}', None),
    (b'{"prompt": "x", "guidance_scale": 1e400}', "guidance_scale"),
    (b'{"prompt": "x", "n": 1e400}', "n"),
    (b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", None),
    (b'{"prompt": "x", "n": 01}', None),
    (b'{"prompt": "x", "prompt": "y"}', "prompt"),
    (b'{"prompt": "x", "n": 1, "n": 1}', "n"),
    (b'{"prompt": "x", "foo": {"a": 1, "a": 2}}', "a"),
    (b'{"prompt": "\\ud800"}', "prompt"),
    (b'{"prompt": "x", "negative_prompt": "\\udfff"}', "negative_prompt"),
    (b'{"prompt": "x", "user": "\\ud800"}', "user"),
    (b'{"prompt": "x", "model": "\\ud800"}', "model"),
    (b'{"prompt": "x", "size": "\\ud800"}', "size"),
    (b'{"prompt": ["\\ud800"]}', "prompt"),
    (b'{"prompt": "x", "\\ud800": 1}', None),
    (b'{"prompt": "\\u0000"}', "prompt"),
    (b"[" * 500_000, None),
    (b'{"a":' * 100_000, None),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    (b'{"prompt": "' + b"\\u0001" * 100 + b'"' * 3 + b"}", None),
]


@pytest.mark.parametrize(("content", "param"), BODIES, ids=lambda value: repr(value)[:40])
def test_a_body_that_is_not_strict_json_is_refused(refusing: Router, content: bytes, param: str | None) -> None:
    for path in (GENERATIONS, "/v1/jobs"):
        response = refusing.client.post(path, data=content, content_type="application/json")
        assert error_of(response, 400)["param"] == param


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_another_content_type_is_415(refusing: Router, kind: str | None) -> None:
    response = refusing.client.post(GENERATIONS, data=json.dumps({"prompt": PROMPT}), content_type=kind)
    error = error_of(response, 415)
    assert error["code"] == "unsupported_media_type"
    assert "application/json" in error["message"]


def test_a_megabyte_of_prompt_is_413(refusing: Router) -> None:
    error = error_of(refusing.post(json={"prompt": "a" * 2**20}), 413)
    assert error["code"] == "request_too_large"


@pytest.mark.parametrize("value", ["", " ", "k" * 256, "a\u00e9b", "a\tb"])
def test_a_bad_idempotency_key_is_refused(refusing: Router, value: str) -> None:
    response = refusing.post(headers={"Idempotency-Key": value})
    assert error_of(response, 400)["param"] == "Idempotency-Key"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("POST", "/v1/images/nothing", 404, "not_found"),
        ("GET", GENERATIONS, 405, "method_not_allowed"),
        ("PUT", "/v1/jobs", 405, "method_not_allowed"),
        ("GET", "/v1/models/nope", 404, "model_not_found"),
        ("GET", "/v1/models/a/b/c", 404, "model_not_found"),
        ("GET", "/v1/jobs/nope", 404, "not_found"),
        ("DELETE", "/v1/jobs/nope", 404, "not_found"),
        ("GET", "/v1/jobs/nope/events", 404, "not_found"),
        ("GET", "/v1/jobs/%ff%00", 404, "not_found"),
        ("GET", "/v1/jobs/{x}", 404, "not_found"),
    ],
)
def test_flasks_own_errors_have_openais_shape(refusing: Router, method: str, path: str, status: int, code: str) -> None:
    response = refusing.client.open(path, method=method)
    assert error_of(response, status)["code"] == code
    if status == 405:
        assert response.headers["Allow"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(sorted({name for name, _ in FIELDS})) | st.text(max_size=10)
SANE = st.fixed_dictionaries({"prompt": st.just("x"), "size": st.sampled_from(["16x16", "32x16"])})


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(base=SANE | st.just({}), fields=st.dictionaries(NAMES, VALUES, max_size=4))
def test_no_json_whatever_makes_the_router_fail(router: Router, base: dict[str, Any], fields: dict[str, Any]) -> None:
    content = json.dumps({**base, **fields, "request_timeout_s": 20})
    for path in (GENERATIONS, "/v1/jobs"):
        response = router.client.post(path, data=content, content_type="application/json")
        if response.status_code >= 300:
            assert response.status_code in (400, 404, 413)
            error_of(response, response.status_code)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60))
def test_no_bytes_whatever_make_the_router_fail(router: Router, content: bytes) -> None:
    response = router.client.post(GENERATIONS, data=content, content_type="application/json")
    error_of(response, 400)
