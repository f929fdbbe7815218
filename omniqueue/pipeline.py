"""A pipeline and its stages, frozen: what a stage config says once it has been checked (see configfile.py)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

#: Names of the queues when a router serves one pipeline; with several it is ``<pipeline>.stage<N>``.
QUEUE = "stage{stage_id}"


@dataclass(frozen=True)
class SizeRule:
    """The picture sizes a pipeline can make: multiples and limits in pixels, area in square pixels."""

    multiple: int = 1
    min_side: int = 1
    max_side: int = 4096
    max_area: int = 4096 * 4096
    default: tuple[int, int] = (1024, 1024)


@dataclass(frozen=True)
class FrameRule:
    """The videos a pipeline can make: with a ``step`` above 1 it makes one frame, or one more for every ``step``."""

    step: int = 1
    max_frames: int = 241
    #: Frames of a request that says neither their number nor a length.
    default: int = 64
    #: Frames a second, unless a request says otherwise.
    fps: float = 16.0


@dataclass(frozen=True)
class Stage:
    """One stage: what it runs, what it reads, how many requests it takes at once."""

    stage_id: int
    name: str
    queue: str
    engine: str = "vllm_omni"
    #: llm_ar, llm_generation or diffusion, as vLLM-Omni names them.
    execution_type: str = "llm_ar"
    input_sources: tuple[int, ...] = ()
    final_output: bool = False
    #: text, image, audio or video.
    final_output_type: str | None = None
    #: Requests in the engine at once; also the Celery worker's concurrency.
    max_num_seqs: int = 1
    devices: str | None = None
    #: Workers of this stage that ``omniqueue up`` starts; placement.replicas says which devices each gets.
    num_replicas: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    #: The fake engine's or a user engine's own arguments.
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    default_sampling_params: Mapping[str, Any] = field(default_factory=dict)
    #: The stage's entry in vLLM-Omni's deploy format, our own keys taken out.
    deploy: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pipeline:
    """A checked stage config."""

    #: vLLM-Omni's registry key, or the config's own name.
    name: str
    stages: tuple[Stage, ...]
    #: Where it was read from, for messages.
    path: str = ""
    #: Checkpoint folder or hub id; OMNIQUEUE_MODEL or --model override it.
    model: str | None = None
    #: What clients may put into ``model``; empty means the model's own name.
    served_model_names: tuple[str, ...] = ()
    #: Request fields that the model takes and does not use: the answer says so (``warnings``).
    unused_fields: tuple[str, ...] = ()
    #: Which of params.EXTRA_FIELDS and SPEECH_FIELDS the model honours; a request with another of them is refused.
    extra_fields: tuple[str, ...] = ()
    #: Most pictures that a request may bring to be edited; 0 when the model takes none.
    max_images: int = 0
    size: SizeRule = SizeRule()
    frames: FrameRule = FrameRule()
    #: What speech may ask for as ``voice``; ``default`` is every model's own.
    voices: tuple[str, ...] = ()
    #: Longest sound that one request may ask for, in seconds.
    max_audio_s: float = 60.0
    #: Largest ``n`` of one request.
    max_n: int = 10
    #: Largest number of denoising steps of one request.
    max_steps: int = 200
    #: Largest prompt, in characters.
    max_prompt_chars: int = 32_768
    request_timeout_s: float = 600.0
    #: Jobs accepted and not finished at once, before 429.
    max_queue: int = 256
    #: How often a stage of one job is tried before the job fails.
    max_attempts: int = 3
    #: How long a claimed stage may go without a heartbeat before another worker gets it.
    lease_s: float = 5.0
    #: How long a finished job and its files are kept.
    result_ttl_s: float = 3600.0
    #: How long an engine may take to load.
    init_timeout_s: float = 1800.0
    #: Work in flight without any step for this long means a hung engine.
    hang_timeout_s: float = 600.0
    #: Top level of the deploy YAML without ``stages`` and our own keys.
    deploy: Mapping[str, Any] = field(default_factory=dict)
    #: The platform whose overlay was applied.
    platform: str = "cpu"
    #: What reading the file decided or changed, for ``omniqueue validate``.
    notes: tuple[str, ...] = ()

    def stage(self, stage_id: int) -> Stage:
        """The stage of that id; KeyError if there is none."""
        for stage in self.stages:
            if stage.stage_id == stage_id:
                return stage
        raise KeyError(f"{self.name} has no stage {stage_id}; it has {[s.stage_id for s in self.stages]}")

    @cached_property
    def final_stages(self) -> tuple[Stage, ...]:
        """Stages whose output the client gets."""
        return tuple(stage for stage in self.stages if stage.final_output)

    @cached_property
    def topology(self) -> tuple[dict[str, Any], ...]:
        """The part that router and workers must agree on."""
        return tuple(
            {
                "stage_id": stage.stage_id,
                "name": stage.name,
                "engine": stage.engine,
                "execution_type": stage.execution_type,
                "input_sources": list(stage.input_sources),
                "final_output": stage.final_output,
                "final_output_type": stage.final_output_type,
            }
            for stage in self.stages
        )

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of name and topology; a worker with another one is refused."""
        text = json.dumps([self.name, self.topology], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]
