"""What a stage reads: the outputs of earlier stages and the media that the request brought, mapped while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from omniqueue import errors
from omniqueue.engines.base import StageOutput
from omniqueue.payloads import PayloadStore, Tensor
from omniqueue.pipeline import Stage
from omniqueue.store import Claim


@dataclass(frozen=True)
class Inputs:
    """``sources``: by stage id, an output per item. ``media``: by name, the same for every item."""

    sources: Mapping[int, Sequence[StageOutput]]
    media: Mapping[str, Tensor] = field(default_factory=dict)


@contextlib.contextmanager
def mapped(payloads: PayloadStore, stage: Stage, claim: Claim) -> Iterator[Inputs]:
    """Everything the stage reads for this claim. Raises PayloadError that names the edge of what is not there whole."""
    with contextlib.ExitStack() as stack:
        sources = {}
        for stage_id in stage.input_sources:
            edge, reference = f"stage {stage_id} -> stage {claim.stage_id}", claim.references.get(stage_id)
            if reference is None:
                raise errors.PayloadError(f"{edge}: stage {stage_id} left no output.")
            try:
                payload = stack.enter_context(payloads.open(reference))
            except errors.PayloadError as exc:
                raise errors.PayloadError(f"{edge}: {exc.message}") from exc
            sources[stage_id] = [StageOutput(item.data, item.tensors) for item in payload.items]
        if claim.input_reference is None:
            yield Inputs(sources)
        else:
            yield Inputs(sources, stack.enter_context(payloads.open(claim.input_reference)).items[0].tensors)
