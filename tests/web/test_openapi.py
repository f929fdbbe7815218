"""The OpenAPI document is about the routes that there are, and says of them what is so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.web.support import Router, error_of
from web import app, openapi

OPERATIONS = [operation for family in app.FAMILIES for operation in family.operations]


def rules(router: Router) -> set[tuple[str, str]]:
    """Method and path of every Flask route, as OpenAPI writes them."""
    return {
        (method, re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule))
        for rule in router.application.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }


def document(router: Router) -> dict[str, Any]:
    response = router.client.get("/openapi.json")
    assert response.status_code == 200
    assert response.content_type == "application/json"
    made: dict[str, Any] = response.json
    return made


def test_every_route_is_in_the_document_and_nothing_else_is(idle_router: Router) -> None:
    said = {(operation.method, operation.path) for operation in OPERATIONS}
    assert said == rules(idle_router)
    paths = document(idle_router)["paths"]
    assert {(method.upper(), path) for path, methods in paths.items() for method in methods} == said


def test_every_path_parameter_is_described(idle_router: Router) -> None:
    for path, methods in document(idle_router)["paths"].items():
        for operation in methods.values():
            described = {entry["name"] for entry in operation.get("parameters", ()) if entry["in"] == "path"}
            assert described == set(re.findall(r"\{(\w+)\}", path))


def test_every_reference_leads_somewhere(idle_router: Router) -> None:
    made = document(idle_router)
    text = msgspec.json.encode(made).decode()
    names = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert names
    assert names <= made["components"]["schemas"].keys()


def test_every_error_has_openais_shape_and_every_operation_an_id_of_its_own(idle_router: Router) -> None:
    ids = []
    for methods in document(idle_router)["paths"].values():
        for operation in methods.values():
            ids.append(operation["operationId"])
            for status, answer in operation["responses"].items():
                if int(status) >= 400:
                    [content] = answer["content"].values()
                    assert content["schema"]["$ref"].rpartition("/")[2] in ("ErrorAnswer", "NotReady")
    assert len(ids) == len(set(ids))


def test_limits_and_enums_are_those_that_the_requests_are_checked_with(idle_router: Router) -> None:
    fields = document(idle_router)["components"]["schemas"]["ImageGeneration"]["properties"]
    assert {"enum": ["jpeg", "png", "webp"]} in fields["output_format"]["anyOf"]
    [steps] = [part for part in fields["num_inference_steps"]["anyOf"] if part["type"] == "integer"]
    assert steps["minimum"] == 1
    assert fields["prompt"]["type"] == "string"


@pytest.mark.parametrize("field", ["n", "size", "seed", "output_format", "priority", "stream", "user"])
def test_null_is_the_same_as_not_given_and_the_document_says_so(router: Router, field: str) -> None:
    entry = document(router)["components"]["schemas"]["ImageGeneration"]["properties"][field]
    assert {"type": "null"} in entry["anyOf"]
    assert router.post(json={"prompt": "x", field: None}).status_code == 200


def test_the_page_of_the_document_names_every_route_and_field(idle_router: Router) -> None:
    response = idle_router.client.get("/docs")
    assert response.status_code == 200
    assert response.content_type == "text/html; charset=utf-8"
    for operation in OPERATIONS:
        assert f"<code>{operation.method} {operation.path}</code>" in response.text
    for name in ("num_inference_steps", "response_format", "oldest_wait_s"):
        assert f"<code>{name}</code>" in response.text
    assert "<script" not in response.text
    assert "http://" not in response.text.replace("http://localhost", "")


def test_a_schema_in_a_few_words() -> None:
    assert openapi.schema_text({"type": "integer", "minimum": 1, "maximum": 10000}) == "integer, >= 1, <= 10,000"
    assert openapi.schema_text({"anyOf": [{"enum": ["a", 1]}, {"type": "null"}]}) == '"a" | 1'
    assert openapi.schema_text({"type": "array", "items": {"$ref": "#/x/Job"}}) == "list of Job"
    assert openapi.schema_text({"type": "string", "maxLength": 256}) == "string, at most 256"
    assert openapi.schema_text({}) == "anything"


def test_a_path_that_is_not_there_is_still_an_error_of_ours(idle_router: Router) -> None:
    error_of(idle_router.client.get("/openapi.yaml"), 404)


# -- docs/http.md ------------------------------------------------------------------------------------------------------

DOCS = (Path(__file__).parents[2] / "docs" / "http.md").read_text()


def table(document: dict[str, Any], name: str, without: str | None = None) -> str:
    """A request's fields as a table for docs/http.md; those of ``without`` are left out."""
    schemas = document["components"]["schemas"]
    known = schemas[without]["properties"] if without else {}
    rows = ["| field | values | default | |", "|---|---|---|---|"]
    required = schemas[name].get("required", ())
    for field, entry in schemas[name]["properties"].items():
        if field in known:
            continue
        values = openapi.schema_text(entry).replace("|", "or")
        default = "required" if field in required else json.dumps(entry.get("default"))
        default = "" if default in ("null", "[]") else default
        rows.append(
            f"| `{field}` | {'leave it out' if values == 'null' else values} | {default} | {openapi.said_of(entry)} |"
        )
    return "\n".join(rows)


@pytest.mark.parametrize(("name", "without"), [("ImageGeneration", None), ("ImageEdit", "ImageGeneration")])
def test_the_tables_in_the_docs_are_those_of_the_document(idle_router: Router, name: str, without: str | None) -> None:
    made = table(document(idle_router), name, without)
    assert made in DOCS, f"put this into docs/http.md:\n\n{made}\n"


def test_the_docs_name_every_route_and_every_setting_of_the_router(idle_router: Router) -> None:
    for operation in OPERATIONS:
        assert operation.path in DOCS, operation.path
    for name in ("API_KEYS", "API_KEYS_FILE", "RATE_LIMIT", "MAX_UPLOAD_BYTES", "ALLOW_REMOTE_MEDIA"):
        assert f"`OMNIQUEUE_{name}`" in DOCS


def test_the_docs_tell_of_every_status(idle_router: Router) -> None:
    told = {
        int(status)
        for methods in openapi.document(OPERATIONS, keys=True)["paths"].values()
        for operation in methods.values()
        for status in operation["responses"]
    }
    assert told == {int(status) for status in re.findall(r"^\| (\d{3}) \|", DOCS, re.MULTILINE)}
