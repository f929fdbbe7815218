"""Strict YAML: plain data only, no key twice, and every key remembers the file, line and path it came from."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from omniqueue import errors

#: A stage config is a page of text; more is a mistake or an attack.
_MAX_BYTES = 1 << 20
#: Values after aliases are expanded; a few lines of aliases can stand for billions.
_MAX_VALUES = 50_000
_MAX_DEPTH = 40

_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Mark:
    """Where something stands: file, line (from 1; 0 if unknown), and path in the file, such as stages[1].devices."""

    file: str
    line: int = 0
    path: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.path}" if self.path else place

    def child(self, key: object, line: int | None = None) -> Mark:
        """The mark of an entry: ``[2]`` for a list's, ``.key`` for a mapping's."""
        text = f"[{key}]" if isinstance(key, int) else f".{key}" if self.path else str(key)
        return Mark(self.file, self.line if line is None else line, self.path + text)


class Map(dict[Any, Any]):
    """A mapping that knows where it and each of its keys were written."""

    def __init__(self, mark: Mark) -> None:
        super().__init__()
        self.mark = mark
        self.marks: dict[Any, Mark] = {}

    def put(self, key: Any, value: Any, mark: Mark) -> None:
        """Set a key and where it came from."""
        self[key] = value
        self.marks[key] = mark

    def at(self, key: Any) -> Mark:
        """Where a key stands, or would stand."""
        return self.marks.get(key) or self.mark.child(key)

    def copy(self) -> Map:
        """A copy one level deep, marks included."""
        twin = Map(self.mark)
        twin.update(self)
        twin.marks.update(self.marks)
        return twin


def plain(value: Any) -> Any:
    """The same data as ordinary dicts and lists, keys without a value left out."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items() if entry is not None}
    return [plain(entry) for entry in value] if isinstance(value, list) else value


def nearest(word: object, names: Iterable[str], where: str = "stage_configs/README.md") -> str:
    """A clause that offers the nearest right name, or all of them when they are few, or says where they are listed."""
    options = sorted(set(names))
    by_lower = {name.lower(): name for name in options}
    close = difflib.get_close_matches(str(word).lower(), list(by_lower), n=1, cutoff=0.6)
    if close:
        return f"did you mean {by_lower[close[0]]}?"
    return f"known are {', '.join(options)}" if 0 < len(options) <= 12 else f"{where} lists the names"


class Problems:
    """Everything found wrong, told together."""

    def __init__(self) -> None:
        self.found: list[tuple[Mark, str]] = []

    def add(self, mark: Mark, text: str) -> None:
        """Remember one problem; the same one twice counts once."""
        if (mark, text) not in self.found:
            self.found.append((mark, text))

    def check(self) -> None:
        """Raise ConfigError with one line per problem, if there is any."""
        if self.found:
            raise errors.ConfigError(
                "\n".join(f"{mark}: {text}" for mark, text in self.found), param=self.found[0][0].path or None
            )


def fail(mark: Mark, text: str) -> errors.ConfigError:
    """One problem as an exception."""
    return errors.ConfigError(f"{mark}: {text}", param=mark.path or None)


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without dates and with 1e-4 as a number, as OmegaConf reads vLLM-Omni's files."""


_Loader.yaml_implicit_resolvers = {
    first: [entry for entry in entries if entry[0] != f"{_TAG}timestamp"]
    for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(f"{_TAG}float", re.compile(r"^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), list("-+0123456789"))


class _Builder:
    """Turns YAML nodes into plain values, refusing what is not plain."""

    def __init__(self, loader: _Loader) -> None:
        self._construct = {
            f"{_TAG}null": loader.construct_yaml_null,
            f"{_TAG}bool": loader.construct_yaml_bool,
            f"{_TAG}int": loader.construct_yaml_int,
            f"{_TAG}float": loader.construct_yaml_float,
            f"{_TAG}str": loader.construct_yaml_str,
        }
        self._left = _MAX_VALUES

    def build(self, node: yaml.Node, mark: Mark, depth: int = 0) -> Any:
        """The value of a node; ``mark`` is where it stands."""
        self._left -= 1
        if self._left < 0 or depth > _MAX_DEPTH:
            raise fail(mark, "is nested too deeply, or its aliases stand for too much; write it out plainly")
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self._map(node, mark, depth + 1)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self.build(item, mark.child(i, _line(item)), depth + 1) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag in self._construct:
            return self._scalar(node, mark)
        raise fail(mark, f"has the YAML tag {node.tag.replace(_TAG, '!!')}, which is not read here; write plain values")

    def _scalar(self, node: yaml.ScalarNode, mark: Mark) -> Any:
        try:
            value = self._construct[node.tag](node)
        except (ValueError, KeyError, OverflowError):
            kind = node.tag.removeprefix(_TAG)
            raise fail(mark, f"is {node.value[:40]!r}, which cannot be read as YAML's {kind}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise fail(mark, f"must be a finite number, not {node.value[:40]}")
        if isinstance(value, str) and "${" in value:
            raise fail(mark, "holds ${...}, which is not expanded here; write the value out")
        return value

    def _map(self, node: yaml.MappingNode, mark: Mark, depth: int) -> Map:
        result, merged = Map(mark), []
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                merged += self._bases(value_node, mark, depth)
                continue
            key = self.build(key_node, mark, depth)
            if not isinstance(key, Hashable):
                raise fail(mark.child("?", _line(key_node)), "a key must be a plain word, not a list or a mapping")
            place = mark.child(str(key), _line(key_node))
            if key in result:
                raise fail(place, f"is set twice, first in line {result.marks[key].line}; keep one")
            result.put(key, self.build(value_node, place, depth), place)
        for base in merged:
            for key in base.keys() - result.keys():
                result.put(key, base[key], base.marks[key])
        return result

    def _bases(self, node: yaml.Node, mark: Mark, depth: int) -> list[Map]:
        """The mappings behind ``<<``, the first one winning."""
        value = self.build(node, mark.child("<<", _line(node)), depth)
        bases = value if isinstance(value, list) else [value]
        if not all(isinstance(base, Map) for base in bases):
            raise fail(mark.child("<<", _line(node)), "must be a mapping or a list of mappings")
        return bases


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _text(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise fail(Mark(str(path)), f"cannot be read: {error.strerror or error}") from None
    if len(data) > _MAX_BYTES:
        raise fail(Mark(str(path)), f"is larger than {_MAX_BYTES} bytes, which no stage config is")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise fail(Mark(str(path)), f"is not UTF-8 text: byte {error.start}") from None


def read(path: Path) -> Map:
    """Read one YAML file whose top level is a mapping. Raises ConfigError with file and line."""
    mark, text = Mark(str(path)), _text(path)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        value = None if node is None else _Builder(loader).build(node, mark)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise fail(Mark(str(path), line), f"is not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise fail(mark, f"is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise fail(mark, "is nested too deeply; write it out plainly") from None
    if not isinstance(value, Map):
        raise fail(mark, "must be a mapping with a key `stages`" if value is not None else "is empty")
    return value
