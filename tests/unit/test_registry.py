"""The generator of topologies.yaml, as far as it can be tried without vLLM-Omni."""

from __future__ import annotations

import enum
import typing
from typing import Any, ForwardRef

import pytest
import yaml

from omniqueue.engines import registry


class Colour(enum.Enum):
    RED = "red"


class Other:
    """A class that no YAML value is."""


@pytest.mark.parametrize(
    ("annotation", "kinds"),
    [
        (int, {"int"}),
        ("int | None", {"int"}),
        ("dict[str, int | str] | None", {"map"}),
        ("str | list[str] | None", {"str", "list"}),
        (bool | str | None, {"bool", "str"}),
        (dict[str, Any], {"map"}),
        (ForwardRef("dict[str, Any]"), {"map"}),
        (ForwardRef("Any"), {"any"}),
        (typing.Optional[typing.Literal["a", "b"]], {"str"}),  # noqa: UP045
        (typing.Literal["a", "b"], {"str"}),
        (Colour, {"str"}),
        (Other, set()),
        (Other | dict[str, Any], {"map"}),
        ("collections.abc.Mapping[str, float]", {"map"}),
    ],
)
def test_annotations_become_kinds_of_yaml_values(annotation: Any, kinds: set[str]) -> None:
    assert registry.kinds(annotation) == kinds


def test_a_rows_entry_is_written_on_one_line() -> None:
    text = yaml.dump([registry._Flow(a=1, b=[2, 3])], Dumper=registry._Dumper, sort_keys=False)
    assert text == "- {a: 1, b: [2, 3]}\n"
