"""What an engine says, gathered and written in batches."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from omniqueue import errors
from omniqueue.engines.base import Say
from omniqueue.store import Claim, Store
from tests.unit import support
from workers import pieces


def claim(attempt: int = 1, **job: Any) -> Claim:
    return Claim("0" * 32, 0, attempt, {"stream": True, **job}, 10.0, None, {})


STAGE = dataclasses.replace(support.pipeline(1).stages[0], final_output_type="text")


class Records(Store):
    """Keeps what is said, and how often."""

    def __init__(self) -> None:
        self.calls: list[tuple[Claim, list[dict[str, Any]]]] = []
        self.error: Exception | None = None

    def say(self, claim: Claim, pieces: Any) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.calls.append((claim, list(pieces)))

    def text(self, index: int = 0) -> str:
        return "".join(one["text"] for _, found in self.calls for one in found if one["index"] == index)


def sayer(writer: pieces.Pieces, held: Claim, index: int = 0) -> Say:
    say = writer.of(held, STAGE, index)
    assert say is not None
    return say


def wait_for(records: Records, text: str, index: int = 0) -> None:
    deadline = time.monotonic() + 5
    while records.text(index) != text:
        assert time.monotonic() < deadline, records.calls
        time.sleep(0.01)


def test_nobody_is_told_what_nobody_reads() -> None:
    writer = pieces.Pieces(Records())
    assert writer.of(claim(stream=False), STAGE, 0) is None
    assert writer.of(claim(), dataclasses.replace(STAGE, final_output=False), 0) is None
    assert writer.of(claim(), dataclasses.replace(STAGE, final_output_type="image"), 0) is None


def test_many_words_become_few_pieces_that_say_where_they_begin() -> None:
    records = Records()
    say = sayer(pieces.Pieces(records), claim(3))
    words = [f"w{number} " for number in range(200)]
    for word in words:
        say({"text": word, "tokens": 1, "logprobs": [{"token": word}]})
    wait_for(records, "".join(words))
    assert len(records.calls) < 50
    at = token = 0
    for _, [piece] in records.calls:
        assert (piece["attempt"], piece["index"], piece["at"], piece["token"]) == (3, 0, at, token)
        assert len(piece["logprobs"]) == piece["tokens"]
        at, token = at + len(piece["text"]), token + piece["tokens"]
    assert token == 200


def test_items_and_jobs_are_kept_apart() -> None:
    records = Records()
    writer = pieces.Pieces(records)
    mine, other = claim(), claim(2)
    for held, index, text in ((mine, 0, "a"), (mine, 1, "b"), (other, 0, "c")):
        sayer(writer, held, index)({"text": text, "tokens": 1})
    wait_for(records, "ac")
    wait_for(records, "b", 1)
    assert {(held.attempt, one["index"], one["text"]) for held, found in records.calls for one in found} == {
        (1, 0, "a"), (1, 1, "b"), (2, 0, "c"),
    }  # fmt: skip


@pytest.mark.parametrize("error", [errors.BrokerUnavailable(), RuntimeError("x")])
def test_a_piece_that_cannot_be_written_leaves_a_gap_and_no_more(error: Exception) -> None:
    records = Records()
    records.error = error
    say = sayer(pieces.Pieces(records), claim())
    say({"text": "lost", "tokens": 1})
    time.sleep(5 * pieces.BATCH_S)
    say({"text": "found", "tokens": 1})
    wait_for(records, "found")
    assert records.calls[0][1][0]["at"] == 4
