"""Checks of single values from a stage config: each says what is wrong, in words that fit after a path, or None."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from omniqueue.yamlfile import nearest

#: Says what is wrong with a value ("must be ..., not ..."), or None.
Check = Callable[[Any], str | None]

OUTPUT_TYPES = ("text", "image", "audio", "video")
EXECUTION_TYPES = ("llm_ar", "llm_generation", "diffusion")
ENGINES = ("vllm_omni", "vllm", "fake")

_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a mapping",
}
_KINDS = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "map": dict}
_USER_ENGINE = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")


def shown(value: Any) -> str:
    """A value as the file would write it, cut to a readable length."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_a(value: Any, kind: type) -> bool:
    """Whether a YAML value is of a kind; true is no number, and a whole number is a number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def one_of_kinds(*kinds: type) -> Check:
    """The value is of one of these kinds."""
    wanted = " or ".join(_NAMES[kind] for kind in kinds)

    def check(value: Any) -> str | None:
        return None if any(is_a(value, kind) for kind in kinds) else f"must be {wanted}, not {shown(value)}"

    return check


def number(kind: type, low: float, high: float, *, open_low: bool = False) -> Check:
    """A number of that kind within limits; ``open_low`` excludes the lower one."""
    limits = f"{'more than' if open_low else 'from'} {low:g} {'and at most' if open_low else 'to'} {high:g}"

    def check(value: Any) -> str | None:
        if is_a(value, kind) and low <= value <= high and not (open_low and value == low):
            return None
        return f"must be {_NAMES[kind]} {limits}, not {shown(value)}"

    return check


def choice(*options: str) -> Check:
    """One of these words."""

    def check(value: Any) -> str | None:
        if value in options:
            return None
        return f"must be one of {', '.join(options)}, not {shown(value)}; {nearest(value, options)}"

    return check


def name(value: Any) -> str | None:
    """Text that says something and has no control characters."""
    if isinstance(value, str) and value.strip() and value.isprintable():
        return None
    return f"must be a name, not {shown(value)}"


def names(value: Any) -> str | None:
    """A name or a list of different names."""
    entries = value if isinstance(value, list) else [value]
    if not entries or any(name(entry) for entry in entries):
        return f"must be a name or a list of names, not {shown(value)}"
    return None if len(set(entries)) == len(entries) else f"names one thing twice: {shown(value)}"


def stage_ids(value: Any) -> str | None:
    """A list of stage ids."""
    if isinstance(value, list) and all(is_a(entry, int) and entry >= 0 for entry in value):
        return None if len(set(value)) == len(value) else f"names one stage twice: {shown(value)}"
    return f"must be a list of stage ids such as [0], not {shown(value)}"


def engine(value: Any) -> str | None:
    """A known engine or ``package.module:Class``."""
    if value in ENGINES or (isinstance(value, str) and _USER_ENGINE.match(value)):
        return None
    return f"must be one of {', '.join(ENGINES)} or package.module:Class, not {shown(value)}; {nearest(value, ENGINES)}"


def devices(value: Any) -> str | None:
    """Device ids separated by commas; a single number need not be quoted."""
    text = str(value) if is_a(value, int) else value
    if isinstance(text, str) and re.fullmatch(r"\s*(\d+|(GPU|MIG)-[\w-]+)(\s*,\s*(\d+|(GPU|MIG)-[\w-]+))*\s*", text):
        ids = [part.strip() for part in text.split(",")]
        return None if len(set(ids)) == len(ids) else f"names one device twice: {text!r}"
    if isinstance(value, list):
        return f'must be text such as "0,1", not a list; write "{",".join(map(str, value))[:40]}"'
    return f'must be device ids such as "0" or "0,1", not {shown(value)}'


def environment(value: Any) -> str | None:
    """Environment variables: text, or a number that stands for its text."""
    if not isinstance(value, dict):
        return f"must be a mapping of environment variables, not {shown(value)}"
    for key, entry in value.items():
        if not isinstance(key, str) or not key or "=" in key or "\0" in key:
            return f"has {shown(key)}, which is no name for an environment variable"
        if entry is not None and (isinstance(entry, (bool, dict, list)) or "\0" in str(entry)):
            return f"must have text for {key}, not {shown(entry)}; put it in quotes"
    return None


def of_spec(spec: str) -> Check | None:
    """The check for a generated type such as ``int|str``; None when anything goes."""
    return None if spec == "any" else one_of_kinds(*(_KINDS[part] for part in spec.split("|")))
