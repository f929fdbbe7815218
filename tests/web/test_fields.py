"""Every field of every request is honoured or refused: all of them, from the OpenAPI document, one at a time.

A field counts as honoured when saying it changes what was recorded for the job, what a stage was run with, or the
answer. What changes nothing must be a value that is listed as changing nothing, and any other value must be refused.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_pictures import encoded
from tests.unit.test_sounds import spoken
from tests.web import live
from tests.web.live import Live

PNG = encoded("RGB", (64, 32))

#: A request of each route that is served, and that says the least.
BASES: dict[str, dict[str, Any]] = {
    "/v1/images/generations": {"prompt": "a", "seed": 1},
    "/v1/images/edits": {"prompt": "a", "seed": 1, "image": PNG},
    "/v1/jobs": {"prompt": "a", "seed": 1},
    "/v1/chat/completions": {"model": "fake-text", "messages": [{"role": "user", "content": "a b c"}], "seed": 1},
    "/v1/audio/speech": {"model": "fake-speech", "input": "a", "seed": 1},
    "/v1/audio/generate": {"model": "fake-speech", "input": "a", "seed": 1},
    "/v1/videos": {"model": "fake-video", "prompt": "a", "seed": 1},
    "/v1/videos/sync": {"model": "fake-video", "prompt": "a", "seed": 1},
}

#: Values that the schema alone does not give away.
VALUES: dict[str, list[Any]] = {
    "prompt": ["b"],
    "negative_prompt": ["b"],
    "input": ["b"],
    "user": ["b"],
    "size": ["64x64"],
    "image": [encoded("L", (64, 32))],
    "image[]": [PNG],
    "mask": [encoded("L", (64, 32))],
    "mask_image": [encoded("L", (64, 32))],
    "reference_image": [PNG],
    "url": ["data:image/png;base64,iVBORw0KGgo=", "http://127.0.0.1/x.png"],
    "url[]": ["http://127.0.0.1/x.png"],
    "messages": [[{"role": "user", "content": "b"}]],
    "stop": ["b", ["b"]],
    "logit_bias": [{"1": 5}],
    "modalities": [["text"], ["audio"], ["image"]],
    "stream_options": [{"include_usage": True}],
    "voice": ["echo"],
    "ref_audio": [f"data:audio/wav;base64,{base64.b64encode(spoken()).decode()}", "http://127.0.0.1/x.wav"],
    "seed": [2],
    "output_compression": [50],
    "model": ["nope"],
}

#: Fields that go together: one without the other is refused by the other's name.
PAIRS = {"width": "height", "height": "width"}

#: Values that change nothing because what they ask for is always so. Any other value is refused.
NEUTRAL: dict[str, list[Any]] = {
    "quality": ["auto", "standard"],
    "background": ["auto", "opaque"],
    "moderation": ["auto", "low"],
    "partial_images": [0],
    "type": ["image"],
    # No model here calls tools, keeps answers or has classes of service.
    "tool_choice": ["auto", "none"],
    "function_call": ["auto", "none"],
    "parallel_tool_calls": [True],
    "service_tier": ["auto", "default"],
    "modalities": [["text"]],
    # What a stream, a request or an edit is without them.
    "stream_format": ["audio"],
    "num_outputs_per_prompt": [1],
}


@pytest.fixture(scope="module")
def running(valkey: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    names = ("fake_image", "fake_text", "fake_speech", "fake_video")
    pipes = [live.shipped(name, delay_s=0, steps=1) for name in names]
    with live.running(valkey, Path(tmp_path_factory.mktemp("fields")), *pipes) as made:
        yield made


def schemas(running: Live) -> dict[str, tuple[str, dict[str, Any]]]:
    """Media type and properties of every request body, by path."""
    document = running.client.get("/openapi.json").json
    found = {}
    for path, methods in document["paths"].items():
        if "requestBody" in methods.get("post", {}):
            kind, content = next(iter(methods["post"]["requestBody"]["content"].items()))
            name = content["schema"]["$ref"].rpartition("/")[2]
            found[path] = (kind, document["components"]["schemas"][name]["properties"])
    return found


def samples(name: str, schema: dict[str, Any]) -> list[Any]:
    """Values to say, other than the default."""
    if name in VALUES:
        return VALUES[name]
    parts = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    made: list[Any] = []
    for part in parts:
        if "enum" in part:
            made += [value for value in part["enum"] if value is not False]
        elif part.get("type") == "boolean":
            made += [True, *([False] if schema.get("default") is True else [])]
        elif part.get("type") == "integer":
            made.append(max(int(part.get("minimum", 1)), min(2, int(part.get("maximum", 2)))))
        elif part.get("type") == "number":
            made.append(min(float(part.get("maximum", 1.5)), max(float(part.get("minimum", 0)), 1.5)))
        elif part.get("type") == "string":
            made.append("b")
    # What is given no value here is refused whatever it says: "b" is as good as any.
    return [value for value in made if value != schema.get("default")] or ["b"]


#: Of those, what ends in these was measured.
_MEASURED = ("_s", "_durations")


def send(running: Live, path: str, kind: str, fields: dict[str, Any]) -> Any:
    if kind == "application/json":
        return running.client.post(path, json=fields)
    data = {name: _part(value) for name, value in fields.items()}
    return running.client.post(path, data=data, content_type=kind)


def _part(value: Any) -> Any:
    if isinstance(value, bytes):
        return io.BytesIO(value), "a.png"
    return json.dumps(value) if isinstance(value, bool) else str(value)


#: Of an answer, what is another each time.
_VARYING = {
    "id",
    "created",
    "created_at",
    "deadline",
    "finished_at",
    "completed_at",
    "expires_at",
    "url",
    "stages",
    "job",
}


def observed(running: Live, response: Any) -> dict[str, Any]:
    """What became of a request: its job, what its last stage was run with, and its answer."""
    job_id = response.headers["X-Omniqueue-Job-Id"]
    text = response.get_data()  # a stream runs to its end
    record = live.eventually(lambda: (found := running.store.job(job_id)) and found.state.terminal and found)
    assert record.state.value == "succeeded", record.error
    return {
        "request": dict(record.request),
        "priority": record.priority,
        "timeout_s": round(record.deadline - record.created_at),
        "params": [stage.params for stage in record.stages],
        "type": response.content_type,
        "whole": response.headers.get("Content-Length") is not None,
        "answer": _steady(response.json) if response.content_type == "application/json" else _events(text),
        "result": [{k: v for k, v in entry.items() if k != "file"} for entry in (record.result or {}).get("data", ())],
    }


def _events(content: bytes) -> Any:
    """A file as it is; of a stream, what each of its events holds."""
    if not content.startswith(b"data: "):
        return content
    lines = [line[6:] for line in content.decode().splitlines() if line.startswith("data: {")]
    return [_steady(json.loads(line)) for line in lines]


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: bool(v) if k in _VARYING or k.endswith(_MEASURED) else _steady(v) for k, v in value.items()}
    return [_steady(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", BASES)
def test_every_field_is_honoured_or_refused(running: Live, path: str) -> None:
    kind, properties = schemas(running)[path]
    plain = send(running, path, kind, BASES[path])
    assert plain.status_code < 300, plain.json
    before = observed(running, plain)
    ignored, seen = [], 0
    for name, schema in properties.items():
        for value in samples(name, schema):
            fields = {**BASES[path], name: value}
            if name == "output_compression":
                fields["output_format"] = "jpeg"
            if name == "stream_options":
                fields["stream"] = True
            response = send(running, path, kind, fields)
            seen += 1
            if response.status_code in (400, 404):
                told = response.json["error"]["param"] or ""
                assert told.startswith((name.partition("[")[0], PAIRS.get(name, name))), (name, value, response.json)
            else:
                assert response.status_code < 300, (name, value, response.json)
                if observed(running, response) == before and value not in NEUTRAL.get(name, []):
                    ignored.append((name, value))
    assert not ignored, str(ignored)
    assert seen >= len(properties) - 2


def test_every_route_with_a_body_is_gone_through(running: Live) -> None:
    assert schemas(running).keys() == BASES.keys()


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_changes_nothing_takes_no_other_value(running: Live, name: str) -> None:
    paths = [path for path, (_, properties) in schemas(running).items() if name in properties]
    assert paths
    for path in paths:
        for value in ("high", 3):
            response = send(running, path, schemas(running)[path][0], {**BASES[path], name: value})
            assert (response.status_code, response.json["error"]["param"]) == (400, name)


def test_what_reached_the_last_stage_is_what_was_said(running: Live) -> None:
    names = ("num_inference_steps", "guidance_scale", "guidance_scale_2", "true_cfg_scale", "seed")
    said = dict(zip(names, (3, 2.5, 1.5, 4.5, 5), strict=True))
    asked = {"prompt": "a", "size": "64x32", "flow_shift": 2, **said}
    response = running.client.post("/v1/images/generations", json=asked)
    params = observed(running, response)["params"][-1]
    assert {name: params[name] for name in said} == said
    assert (params["width"], params["height"], params["extra_args"]) == (64, 32, {"flow_shift": 2})
