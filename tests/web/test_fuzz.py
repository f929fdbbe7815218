"""Requests made from the OpenAPI document: no 5xx, no status and no answer that the document does not tell of."""

from __future__ import annotations

from pathlib import Path

from tests.web import fuzz


def test_no_request_made_from_the_document_breaks_what_it_says(valkey: str, tmp_path: Path) -> None:
    with fuzz.serving(valkey, tmp_path) as url:
        status, report = fuzz.run(url, examples=5, seed=1, timeout_s=300)
    assert status == 0, report[-20_000:]
    assert fuzz.cases(report) > 500, report
