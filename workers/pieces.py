"""What engines say while they write, in batches to Redis, so that a token does not cost a round trip."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omniqueue import errors
from omniqueue.engines.base import Say
from omniqueue.pipeline import Stage
from omniqueue.store import Claim, Store

log = logging.getLogger(__name__)

#: How long pieces are gathered before they are written, in seconds: less than an eye notices.
BATCH_S = 0.03


@dataclass
class _Item:
    """One item of one attempt: how far it is, and what is not written yet."""

    claim: Claim
    index: int
    chars: int = 0
    tokens: int = 0
    piece: dict[str, Any] | None = None

    def add(self, said: Mapping[str, Any]) -> None:
        """``at`` and ``token`` say where the piece begins, so that a reader sees gaps and repetitions."""
        if self.piece is None:
            start = {"attempt": self.claim.attempt, "index": self.index, "at": self.chars, "token": self.tokens}
            self.piece = {**start, "text": "", "tokens": 0}
        text, tokens = str(said.get("text", "")), int(said.get("tokens", 0))
        self.piece["text"] += text
        self.piece["tokens"] += tokens
        if "logprobs" in said:
            self.piece.setdefault("logprobs", []).extend(said["logprobs"])
        self.chars += len(text)
        self.tokens += tokens


class Pieces:
    """One daemon thread per worker; a piece that cannot be written is dropped, since the result has the whole text."""

    def __init__(self, records: Store) -> None:
        self._store = records
        self._changed = threading.Condition()
        self._pending: dict[int, _Item] = {}
        self._thread: threading.Thread | None = None

    def of(self, claim: Claim, stage: Stage, index: int) -> Say | None:
        """Where an item says its text; None when nobody reads it before it is whole."""
        if not (claim.request.get("stream") and stage.final_output and stage.final_output_type == "text"):
            return None
        item = _Item(claim, index)

        def say(piece: Mapping[str, Any]) -> None:
            with self._changed:
                item.add(piece)
                self._pending[id(item)] = item
                if self._thread is None:
                    self._thread = threading.Thread(target=self._loop, name="pieces", daemon=True)
                    self._thread.start()
                self._changed.notify()

        return say

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending)
            self._write()
            time.sleep(BATCH_S)

    def _write(self) -> None:
        with self._changed:
            taken = [(item.claim, item.piece) for item in self._pending.values() if item.piece is not None]
            for item in self._pending.values():
                item.piece = None
            self._pending.clear()
        by_claim: dict[int, tuple[Claim, list[dict[str, Any]]]] = {}
        for claim, piece in taken:
            by_claim.setdefault(id(claim), (claim, []))[1].append(piece)
        for claim, found in by_claim.values():
            try:
                self._store.say(claim, found)
            except errors.BrokerUnavailable:
                log.info("action=pieces_dropped job=%s", claim.job_id)
            except Exception:  # a thread that dies would make every stream wait for its end
                log.exception("action=pieces_failed job=%s", claim.job_id)
