"""Sampling parameters of one request at one stage: the stage config's, the request's over them, then the pipeline's."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import types
import typing
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import msgspec

from omniqueue import errors

#: One request is one item with one answer at its end; these would change that.
_FIXED = frozenset({"n", "output_kind", "num_outputs_per_prompt", "skip_clone", "output_text_buffer_length"})
_PLAIN = (int, float, str, bool, type(None))


def resolve(defaults: Any, overrides: Mapping[str, Any], constraints: Mapping[str, Any]) -> Any:
    """A new parameter object of the class of ``defaults``.

    ``constraints`` are the pipeline's own and win; its ``stop_token_ids`` are added to those there are. Raises
    EngineRejected for a name that the class does not have, or a value it does not take.
    """
    from vllm.exceptions import VLLMClientError
    from vllm_omni.config.stage_config import merge_sampling_constraints

    kind = type(defaults)
    given = {name: checked(kind, name, value) for name, value in overrides.items()}
    values = merge_sampling_constraints({**_values(defaults), **given}, constraints)
    try:
        params = kind(**values)
    except (TypeError, ValueError, VLLMClientError) as exc:
        raise errors.EngineRejected(
            f"The stage does not take these parameters: {exc}", param=getattr(exc, "parameter", None)
        ) from exc
    return _for_one_answer(params)


def _for_one_answer(params: Any) -> Any:
    if hasattr(params, "num_outputs_per_prompt"):
        params.num_outputs_per_prompt = 1
    else:
        from vllm.sampling_params import RequestOutputKind

        params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def _names(kind: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind) if field.init)
    return tuple(kind.__struct_fields__)


def _values(params: Any) -> dict[str, Any]:
    """The constructor arguments that give ``params`` again; derived fields are left to the constructor."""
    return {
        name: getattr(params, name)
        for name in _names(type(params))
        if not name.startswith("_") and name != "output_text_buffer_length"
    }


@functools.cache
def settable(kind: Any) -> dict[str, Any]:
    """The parameters of a class that a request may set, with their types: those made of plain JSON values."""
    hints = typing.get_type_hints(kind)
    return {
        name: hints[name]
        for name in _names(kind)
        if not name.startswith("_") and name not in _FIXED and _is_plain(hints[name])
    }


def _is_plain(hint: Any) -> bool:
    if hint in _PLAIN:
        return True
    origin = typing.get_origin(hint)
    if origin is dict:
        return typing.get_args(hint)[1] is Any or all(map(_is_plain, typing.get_args(hint)))
    if origin in (list, tuple, set, typing.Union, types.UnionType):
        return all(map(_is_plain, typing.get_args(hint)))
    return False


def checked(kind: Any, name: str, value: Any) -> Any:
    """A request's value for one parameter of a class. Raises EngineRejected for a name or a value it does not take."""
    allowed: dict[str, Any] = settable(kind)
    if name not in allowed:
        near = difflib.get_close_matches(name, allowed, n=1)
        hint = f" did you mean {near[0]}?" if near else ""
        raise errors.EngineRejected(f"This stage has no parameter {name!r} that a request may set.{hint}", param=name)
    try:
        return msgspec.convert(value, allowed[name], strict=True, str_keys=True)
    except msgspec.ValidationError as exc:
        raise errors.EngineRejected(f"{name}: {exc}.", param=name) from exc


def token_limit(processors: tuple[str, ...], job: Mapping[str, Any]) -> int | None:
    """How many tokens a picture of the job's size has, when a reader of the stage's output can tell.

    ``processors`` are dotted paths of the readers' input processors; vLLM-Omni puts the function beside them.
    """
    height, width = job.get("height"), job.get("width")
    if height is None or width is None:
        return None
    for path in processors:
        count = getattr(import_module(path.rpartition(".")[0]), "compute_max_tokens", None)
        if count is not None:
            known = inspect.signature(count).parameters
            extra = {"is_i2i": bool(job.get("images"))} if "is_i2i" in known else {}
            return int(count(int(height), int(width), **extra))
    return None


def limit_tokens(params: Any, limit: int | None) -> None:
    """Have a picture's tokens made in full: not more than ``limit``, which counts the end token, and not fewer.

    A model that never ends a picture would run to the end of its context; one that ends early is of no use to others.
    """
    if limit is not None:
        params.max_tokens = min(params.max_tokens or limit, limit)
        params.min_tokens = min(limit - 1, params.max_tokens)


def check_complete(made: int, needed: int, max_tokens: int) -> None:
    """Raise EngineRejected for a picture that was cut short: no later stage could use it.

    ``needed`` leaves out the end mark.
    """
    if made >= needed:
        return
    if made >= max_tokens:
        raise errors.EngineRejected(
            f"max_tokens is {max_tokens}, and a picture of this size has {needed} tokens.", param="max_tokens"
        )
    raise errors.EngineRejected(
        f"The prompt leaves room for {made} of the picture's {needed} tokens; shorten it or ask for a smaller size.",
        param="prompt",
    )


def tell_size(params: Any, job: Mapping[str, Any]) -> None:
    """Give a language-model stage the picture's size in pixels beside its prompt, as vLLM-Omni's own server does.

    GLM-Image places its tokens on a grid of that size; untold, it takes the grid of a 1024 x 1024 picture.
    """
    if job.get("height") is not None and job.get("width") is not None:
        size = {"target_h": int(job["height"]), "target_w": int(job["width"])}
        params.extra_args = {**(params.extra_args or {}), **size}


def seed_codes(params: Any) -> None:
    """Give the codes that some models draw beside the sampled tokens the same seed, as vLLM-Omni's own server does."""
    if params.seed is not None:
        params.extra_args = {**(params.extra_args or {}), "tts_local_seed": params.seed}


def describe(params: Any) -> dict[str, Any]:
    """What was really used, JSON-able: every parameter that differs from the class's default."""
    kind: Any = type(params)
    plain = kind()
    found = {name: getattr(params, name) for name in settable(kind)}
    return {name: _json(value) for name, value in found.items() if value != getattr(plain, name)}


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_json(inner) for inner in value]
    return value
