"""Strict YAML: what is read, and how what is not read is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniqueue import errors, yamlfile


def read(folder: Path, text: str | bytes) -> yamlfile.Map:
    file = folder / "f.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return yamlfile.read(file)


def test_every_key_knows_its_line_and_path(tmp_path: Path) -> None:
    data = read(tmp_path, "a: 1\nstages:\n  - stage_id: 0\n    deep: {x: 1}\n")
    stage = data["stages"][0]
    assert str(stage.at("stage_id")) == f"{tmp_path}/f.yaml:3: stages[0].stage_id"
    assert stage["deep"].at("x").path == "stages[0].deep.x"
    assert stage["deep"].at("missing").path == "stages[0].deep.missing"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.5", 1.5),
        ("2024-01-31", "2024-01-31"),
        ("yes", True),
        ('"0,1"', "0,1"),
        ("0,1", "0,1"),
        ("0x10", 16),
        ("~", None),
    ],
)
def test_scalars_are_read_as_vllm_omni_reads_them(tmp_path: Path, text: str, value: Any) -> None:
    assert read(tmp_path, f"a: {text}\n")["a"] == value


def test_merge_keys_fill_in_what_is_not_set(tmp_path: Path) -> None:
    data = read(tmp_path, "base: &b {x: 1, y: 2}\nmore: &m {y: 3, z: 4}\nuse: {<<: [*b, *m], x: 9}\n")
    assert yamlfile.plain(data["use"]) == {"x": 9, "y": 2, "z": 4}


BAD: list[tuple[str | bytes, str]] = [
    ("", "f.yaml: is empty"),
    ("- a\n", "f.yaml: must be a mapping"),
    ("just text\n", "f.yaml: must be a mapping"),
    ("a: 1\nb: 2\na: 3\n", "f.yaml:3: a: is set twice, first in line 1"),
    ("s:\n - {x: 1, x: 2}\n", "f.yaml:2: s[0].x: is set twice"),
    ("a: [1\n", "f.yaml:2: is not valid YAML"),
    ("a: b: c\n", "f.yaml:1: is not valid YAML"),
    ("a: 1\n---\nb: 2\n", "f.yaml:2: is not valid YAML"),
    ("a: *nowhere\n", "f.yaml:1: is not valid YAML"),
    ("a: \x01\n", "f.yaml: is not valid YAML"),
    (b"a: \xff\xfe\n", "f.yaml: is not UTF-8 text: byte 3"),
    ("a: .nan\n", "f.yaml:1: a: must be a finite number, not .nan"),
    ("a: {b: -.inf}\n", "f.yaml:1: a.b: must be a finite number, not -.inf"),
    ("a: 1.0e+999\n", "f.yaml:1: a: must be a finite number"),
    ("a: ${b}\n", "f.yaml:1: a: holds ${...}, which is not expanded here"),
    ("a: !!python/object:os.system x\n", "f.yaml:1: a: has the YAML tag !!python/object:os.system"),
    ("a: !!binary aGk=\n", "f.yaml:1: a: has the YAML tag !!binary"),
    ("a: !!set {x}\n", "f.yaml:1: a: has the YAML tag !!set"),
    ("a: !!int x\n", "f.yaml:1: a: is 'x', which cannot be read as YAML's int"),
    ("a: !!bool x\n", "f.yaml:1: a: is 'x', which cannot be read as YAML's bool"),
    (f"a: {'9' * 5000}\n", "f.yaml:1: a: is '9999"),
    ("? [a]\n: 1\n", "f.yaml:1: ?: a key must be a plain word"),
    ("a: &a [*a]\n", "is nested too deeply"),
    ("a: {<<: 1}\n", "f.yaml:1: a.<<: must be a mapping or a list of mappings"),
    ("a: " + "[" * 60 + "]" * 60, "is nested too deeply"),
    ("a: " + "[" * 20_000, "f.yaml"),
    ("x: " + "y" * (1 << 20), "f.yaml: is larger than 1048576 bytes"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=range(len(BAD)))
def test_what_is_not_plain_yaml_is_refused_with_its_place(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)


def test_a_few_aliases_cannot_stand_for_billions(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    with pytest.raises(errors.ConfigError, match="aliases stand for too much"):
        read(tmp_path, "\n".join(lines))


def test_a_file_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        yamlfile.read(tmp_path / "none.yaml")
    with pytest.raises(errors.ConfigError, match="cannot be read: Is a directory"):
        yamlfile.read(tmp_path)


@pytest.mark.parametrize(
    ("word", "names", "clause"),
    [
        ("device", ["devices", "env"], "did you mean devices?"),
        ("DEVICES", ["devices"], "did you mean devices?"),
        ("zzz", ["a", "b"], "known are a, b"),
        ("zzz", [f"name{i}" for i in range(20)], "stage_configs/README.md lists the names"),
        (7, ["a"], "known are a"),
    ],
)
def test_the_nearest_right_name_is_offered(word: object, names: list[str], clause: str) -> None:
    assert yamlfile.nearest(word, names) == clause


def _outcome(folder: Path, text: bytes) -> str:
    try:
        return str(read(folder, text).mark)
    except errors.ConfigError as error:
        return error.message


@given(st.text(max_size=200))
def test_random_text_is_read_or_refused_and_nothing_else(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    assert str(folder) in _outcome(folder, text.encode("utf-8", "surrogatepass"))
