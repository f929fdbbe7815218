"""Payloads in shared memory: whole or not there, mapped, bounded, and never a reason for anything but PayloadError."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import json
import mmap
import os
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from omniqueue import (
    errors,
    payloads,
    room,
)
from omniqueue.payloads import ITEM_BYTES, Item, PayloadStore, Reference, Tensor
from tests.unit import support

SHAPES: list[tuple[int, ...]] = [(), (1,), (0,), (3, 0, 2), (7,), (2, 3), (1, 5, 1, 2)]


def tensor(dtype: str, shape: tuple[int, ...]) -> Tensor:
    size = ITEM_BYTES[dtype]
    for side in shape:
        size *= side
    return Tensor(dtype, shape, os.urandom(size))


def items(size: int = 1000) -> list[Item]:
    return [Item({"n": 1}, {"x": tensor("uint8", (size,))})]


def facts(payload: payloads.MappedPayload) -> list[Any]:
    return [
        (dict(item.data), {k: (t.dtype, t.shape, bytes(t.buffer)) for k, t in item.tensors.items()})
        for item in payload.items
    ]


def put_file(shm: PayloadStore, content: bytes) -> Reference:
    """A file of another's making under a name of ours."""
    name = shm.name("0" * 32, 0, 1)
    (shm.directory / name).write_bytes(content)
    return Reference(name, len(content), shm.host)


def framed(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = b"OQP1" + struct.pack("<I", len(text) if length is None else length) + text
    return head + b"\0" * (-len(head) % 64) + body


# -- what goes in comes out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(ITEM_BYTES))
def test_every_dtype_and_shape_comes_back_as_it_was(shm: PayloadStore, dtype: str, shape: tuple[int, ...]) -> None:
    wanted = tensor(dtype, shape)
    reference = shm.put(shm.name("a" * 32, 0, 1), [Item({}, {"t": wanted})])
    with shm.open(reference) as payload:
        (item,) = payload.items
        assert (item.tensors["t"].dtype, item.tensors["t"].shape) == (dtype, shape)
        assert bytes(item.tensors["t"].buffer) == bytes(wanted.buffer)


def test_many_items_keep_their_order_their_facts_and_their_tensors(shm: PayloadStore) -> None:
    several = [
        Item(
            {"index": i, "text": "苹果 🍎 \x00", "deep": {"a": [1, None, 2.5]}},
            {f"t{k}": tensor(dtype, (i % 5, k)) for k, dtype in enumerate(ITEM_BYTES)},
        )
        for i in range(200)
    ]
    reference = shm.put(shm.name("a" * 32, 0, 1), several)
    with shm.open(reference) as payload:
        assert [(i.data, i.tensors.keys()) for i in payload.items] == [(i.data, i.tensors.keys()) for i in several]
        for got, put in zip(payload.items, several, strict=True):
            assert all(bytes(got.tensors[k].buffer) == bytes(t.buffer) for k, t in put.tensors.items())
    assert reference.nbytes == (shm.directory / reference.name).stat().st_size == shm.resident_bytes()


def test_a_payload_may_hold_no_item_and_an_item_no_tensor(shm: PayloadStore) -> None:
    for several in ([], [Item({"only": "facts"}, {})]):
        with shm.open(shm.put(shm.name("a" * 32, 0, len(several)), several)) as payload:
            assert facts(payload) == [({"only": "facts"}, {})] * len(several)


def test_tensors_begin_at_multiples_of_64_bytes(shm: PayloadStore) -> None:
    reference = shm.put(shm.name("a" * 32, 0, 1), [Item({}, {k: tensor("uint8", (5,)) for k in "abc"})])
    content = (shm.directory / reference.name).read_bytes()
    with shm.open(reference) as payload:
        starts = [content.index(bytes(t.buffer)) for t in payload.items[0].tensors.values()]
    assert [start % 64 for start in starts] == [0, 0, 0]


def test_a_reader_of_a_large_payload_maps_and_does_not_copy(shm: PayloadStore) -> None:
    rest = Tensor("uint8", (payloads._SMALL_BYTES,), bytes(payloads._SMALL_BYTES))
    reference = shm.put(shm.name("a" * 32, 0, 1), [Item({}, {"x": Tensor("uint8", (4,), b"abcd"), "rest": rest})])
    with shm.open(reference) as payload:
        view = payload.items[0].tensors["x"].buffer
        assert isinstance(view, memoryview)
        path = shm.directory / reference.name
        with open(path, "r+b") as file:  # what is written to the file is seen through the view
            file.seek(path.read_bytes().index(b"abcd"))
            file.write(b"wxyz")
        assert bytes(view) == b"wxyz"


@pytest.mark.parametrize("more", [0, payloads._SMALL_BYTES])
def test_what_a_reader_writes_stays_its_own(shm: PayloadStore, more: int) -> None:
    facts = {"x": Tensor("uint8", (4,), b"abcd"), "rest": Tensor("uint8", (more,), bytes(more))}
    reference = shm.put(shm.name("a" * 32, 0, 1), [Item({}, facts)])
    with shm.open(reference) as payload, shm.open(reference) as other:
        memoryview(payload.items[0].tensors["x"].buffer)[:] = b"wxyz"
        assert bytes(other.items[0].tensors["x"].buffer) == b"abcd"


def test_reading_does_not_consume(shm: PayloadStore) -> None:
    reference = shm.put(shm.name("a" * 32, 0, 1), items())
    for _ in range(3):
        with shm.open(reference) as payload:
            assert len(payload.items) == 1
    assert shm.names() == [reference.name]


def test_a_reader_keeps_its_view_when_the_payload_is_released(shm: PayloadStore) -> None:
    wanted = items(100_000)
    reference = shm.put(shm.name("a" * 32, 0, 1), wanted)
    with shm.open(reference) as payload:
        shm.release([reference.name])
        assert shm.names() == []
        kept = payload.items[0].tensors["x"].buffer
    assert bytes(kept) == bytes(wanted[0].tensors["x"].buffer)


def test_a_tensor_of_a_reader_may_be_put_again_without_a_framework(shm: PayloadStore) -> None:
    first = shm.put(
        shm.name("a" * 32, 0, 1), [Item({}, {"e": tensor("float32", (0, 3)), "f": tensor("int64", (2, 2))})]
    )
    with shm.open(first) as payload:
        second = shm.put(shm.name("a" * 32, 1, 1), payload.items)
        with shm.open(second) as again:
            assert facts(again) == facts(payload)


def test_arrays_of_other_libraries_are_taken_as_they_are(shm: PayloadStore) -> None:
    arrays: list[Any] = [numpy.arange(6, dtype="float32").reshape(2, 3), numpy.empty((0, 4), "int16")]
    for array in arrays:
        given = Tensor(str(array.dtype), array.shape, memoryview(array))
        with shm.open(shm.put(shm.name("a" * 32, 0, array.ndim + array.size), [Item({}, {"x": given})])) as payload:
            assert bytes(payload.items[0].tensors["x"].buffer) == array.tobytes()


def test_job_stage_and_attempt_each_have_a_name_of_their_own(shm: PayloadStore) -> None:
    names = {shm.name(job, stage, attempt) for job in ("a1", "b2") for stage in (0, 1) for attempt in (1, 2)}
    names.add(shm.input_name("a1"))
    assert len(names) == 9
    assert all(name.startswith("oq_cafe0123_") for name in names)
    assert {payloads.job_of(name) for name in names} == {"a1", "b2"}


def test_a_reference_is_json_and_comes_back(shm: PayloadStore) -> None:
    reference = shm.put(shm.name("a" * 32, 0, 1), items())
    assert Reference.from_json(json.loads(json.dumps(reference.to_json()))) == reference


@pytest.mark.parametrize(
    ("dtype", "shape", "size"), [("float32", (2,), 7), ("complex64", (1,), 8), ("uint8", (-1, -1), 1), ("int8", (), 0)]
)
def test_a_tensor_whose_bytes_do_not_fit_its_shape_is_refused(dtype: str, shape: tuple[int, ...], size: int) -> None:
    with pytest.raises(errors.PayloadError):
        Tensor(dtype, shape, bytes(size))


# -- room --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[PayloadStore]:
    """A payload store with 3 MiB of room: a tmpfs where we may mount one, else the two calls that would tell."""
    with tempfile.TemporaryDirectory(prefix="oqtest-") as folder:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True)
        if mounted.returncode:
            _pretend_small(monkeypatch, folder)
        store = PayloadStore("cafe0123", folder, host="here")
        try:
            yield store
        finally:
            store.close()
            if not mounted.returncode:
                subprocess.run(["umount", folder], check=True)


def _pretend_small(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    def used() -> int:
        return sum(entry.stat().st_size for entry in os.scandir(folder))

    def statvfs(_: Any) -> Any:
        free = max(0, 768 - -(-used() // 4096))
        return os.statvfs_result((4096, 4096, 768, free, free, 0, 0, 0, 0, 255))

    def fallocate(descriptor: int, offset: int, size: int) -> None:
        if used() + size > 3 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(descriptor, offset + size)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(os, "posix_fallocate", fallocate)


def test_a_payload_that_does_not_fit_is_refused_with_both_sizes_and_leaves_no_file(tiny: PayloadStore) -> None:
    with pytest.raises(errors.NoRoom, match=r"bytes free .* needs 4,000,\d{3}; raise its size \(docker: shm_size\)"):
        tiny.put(tiny.name("a" * 32, 0, 1), items(4_000_000))
    assert os.listdir(tiny.directory) == []
    assert room.size_bytes(tiny.directory) == 3 << 20


def test_a_file_system_that_fills_up_while_writing_is_no_room_too(
    tiny: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PayloadStore, "free_bytes", lambda self: 1 << 40)  # another process took the room since
    with pytest.raises(errors.NoRoom):
        tiny.put(tiny.name("a" * 32, 0, 1), items(4_000_000))
    assert os.listdir(tiny.directory) == []


def test_after_no_room_a_smaller_payload_still_goes_in(tiny: PayloadStore) -> None:
    with pytest.raises(errors.NoRoom):
        tiny.put(tiny.name("a" * 32, 0, 1), items(4_000_000))
    reference = tiny.put(tiny.name("b" * 32, 0, 1), items(1_000_000))
    with tiny.open(reference) as payload:
        assert payload.items[0].tensors["x"].nbytes == 1_000_000


def test_no_room_is_answered_as_507() -> None:
    assert (errors.NoRoom.status, errors.NoRoom.code) == (507, "no_room")


def test_a_folder_that_is_missing_is_a_payload_error(tmp_path: Path) -> None:
    gone = PayloadStore("cafe0123", str(tmp_path / "none"), host="here")
    with pytest.raises(errors.PayloadError, match="No such file"):
        gone.put(gone.name("a" * 32, 0, 1), items())


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), ValueError("bad"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["pwrite", "rename"])
def test_a_put_that_fails_leaves_nothing(
    shm: PayloadStore, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    monkeypatch.setattr(os, call, support.raising(error))
    before = support.open_files()
    with pytest.raises(errors.PayloadError if isinstance(error, OSError) else type(error)):
        shm.put(shm.name("a" * 32, 0, 1), items())
    assert shm.names() == []
    assert support.open_files() == before


def test_data_that_is_not_json_is_refused_before_anything_is_written(shm: PayloadStore) -> None:
    for data in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises((ValueError, TypeError)):
            shm.put(shm.name("a" * 32, 0, 1), [Item(data, {})])
    assert shm.names() == []


@pytest.mark.parametrize("size", [0, 1, 1000, payloads._CARRIED_BYTES - 500])
def test_a_small_payload_comes_back_in_its_reference_and_can_be_opened_on_any_host(
    shm: PayloadStore, size: int
) -> None:
    given = items(size)
    reference = shm.keep(shm.name("a" * 32, 0, 1), given)
    assert (shm.names(), reference.store, reference.is_file(shm.host)) == ([], "record", False)
    assert Reference.from_json(json.loads(json.dumps(reference.to_json()))) == reference
    elsewhere = PayloadStore("cafe0123", str(shm.directory), host="there")
    with shm.open(shm.put(shm.name("b" * 32, 0, 1), given)) as file, elsewhere.open(reference) as payload:
        assert facts(payload) == facts(file)
        view = memoryview(payload.items[0].tensors["x"].buffer)
        view[:] = bytes(size)  # its own, as a file's would be


def test_what_is_not_small_is_kept_in_a_file(shm: PayloadStore) -> None:
    reference = shm.keep(shm.name("a" * 32, 0, 1), items(payloads._CARRIED_BYTES))
    assert (shm.names(), reference.store, reference.content) == ([reference.name], "shm", "")
    assert reference.is_file(shm.host)


@pytest.mark.parametrize("content", ["", "AAAA", "no base 64!", "T1FQMf////8="])
def test_a_reference_with_damaged_content_is_a_payload_error(shm: PayloadStore, content: str) -> None:
    reference = dataclasses.replace(shm.keep(shm.name("a" * 32, 0, 1), items()), content=content)
    with pytest.raises(errors.PayloadError), shm.open(reference):
        raise AssertionError("opened")


# -- who may see what --------------------------------------------------------------------------------------------------


def test_a_half_written_payload_cannot_be_opened_and_is_swept(
    shm: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = shm.name("a" * 32, 0, 1)
    reference = Reference(name, 1, shm.host)
    seen: list[list[str]] = []

    def look(*_: Any) -> None:
        with pytest.raises(errors.PayloadError), shm.open(reference):
            raise AssertionError("opened")
        seen.append(shm.names())
        raise SystemExit  # as kill -9 would, but for the clean-up

    monkeypatch.setattr(os, "rename", look)
    monkeypatch.setattr(os, "unlink", lambda path: None)
    with pytest.raises(SystemExit):
        shm.put(name, items())
    monkeypatch.undo()
    (left,) = seen[0]
    assert left.startswith(f"{name}.part")
    assert shm.sweep(lambda ids: ids, min_age_s=0) == []
    assert shm.sweep(lambda ids: set(), min_age_s=0) == [left]
    assert shm.names() == []


def test_a_payload_of_another_host_or_store_is_a_payload_error(shm: PayloadStore) -> None:
    reference = shm.put(shm.name("a" * 32, 0, 1), items())
    for other in (dataclasses.replace(reference, host="there"), dataclasses.replace(reference, store="mooncake")):
        with pytest.raises(errors.PayloadError, match=r"lies in \w+ on host \w+; this is here"), shm.open(other):
            raise AssertionError("opened")


@pytest.mark.parametrize(
    "name", ["oq_cafe0123_gone_0_1", "../etc/passwd", "/etc/passwd", "", ".", "oq_\0", "oq_x/../y"]
)
def test_a_payload_that_is_not_there_or_not_ours_is_a_payload_error(shm: PayloadStore, name: str) -> None:
    with pytest.raises(errors.PayloadError), shm.open(Reference(name, 1, shm.host)):
        raise AssertionError("opened")


def test_a_failed_map_does_not_touch_the_producers_file(shm: PayloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = shm.put(shm.name("a" * 32, 0, 1), items(payloads._SMALL_BYTES))
    with monkeypatch.context() as broken:
        broken.setattr(mmap, "mmap", support.raising(OSError(errno.ENOMEM, "Cannot allocate memory")))
        with pytest.raises(errors.PayloadError), shm.open(reference):
            raise AssertionError("opened")
    with shm.open(reference) as payload:
        assert len(payload.items) == 1


def test_the_sweep_takes_what_is_over_and_leaves_the_rest(shm: PayloadStore) -> None:
    other = PayloadStore("cafe0124", str(shm.directory), host="here")
    running, over = "a" * 32, "b" * 32
    kept = [shm.put(shm.name(running, 0, 1), items()).name, other.put(other.name(over, 0, 1), items()).name]
    gone = [shm.put(shm.name(over, k, 1), items()).name for k in range(3)]
    gone.append(shm.put(shm.input_name(over), items()).name)
    left = [f"{shm.name(over, 0, 1)}-0_0_0", f"omni_0_to_1_kv_cache_{shm.name(over, 0, 1)}-0"]
    for segment in (*left, *(f"shm_{segment}_lockfile.lock" for segment in left)):  # by vLLM-Omni's connectors
        (shm.directory / segment).write_bytes(b"left by a worker that was killed")
        gone.append(segment)
    sent = f"{shm.name(running, 0, 1)}-0_0_0"
    (shm.directory / sent).write_bytes(b"for a stage that has not read it yet")
    kept.append(sent)
    (shm.directory / "oq_cafe0123").write_bytes(b"not ours")
    (shm.directory / "sem.of_another").write_bytes(b"not ours")
    asked: list[set[str]] = []

    def is_live(ids: set[str]) -> set[str]:
        asked.append(ids)
        return {running}

    assert sorted(shm.sweep(is_live, min_age_s=0)) == sorted(gone)
    assert asked == [{running, over}]
    assert sorted(os.listdir(shm.directory)) == sorted([*kept, "oq_cafe0123", "sem.of_another"])


def test_the_sweep_spares_what_was_written_just_now(shm: PayloadStore) -> None:
    old = shm.put(shm.name("b" * 32, 0, 1), items()).name
    time.sleep(0.5)
    young = shm.put(shm.name("a" * 32, 0, 1), items()).name
    assert shm.sweep(lambda ids: set(), min_age_s=0.4) == [old]
    assert shm.names() == [young]


def test_a_sweep_that_cannot_ask_removes_nothing(shm: PayloadStore) -> None:
    shm.put(shm.name("a" * 32, 0, 1), items())
    with pytest.raises(errors.BrokerUnavailable):
        shm.sweep(support.raising(errors.BrokerUnavailable()), min_age_s=0)
    assert len(shm.names()) == 1


def test_releasing_twice_is_fine(shm: PayloadStore) -> None:
    name = shm.put(shm.name("a" * 32, 0, 1), items()).name
    shm.release([name, name, "oq_cafe0123_never_0_1"])
    assert shm.names() == []


def test_files_are_for_their_owner_only(shm: PayloadStore) -> None:
    reference = shm.put(shm.name("a" * 32, 0, 1), items())
    assert (shm.directory / reference.name).stat().st_mode & 0o777 == 0o600


# -- damage ------------------------------------------------------------------------------------------------------------


def open_or_refuse(shm: PayloadStore, content: bytes) -> None:
    """Anything but a payload within the file or PayloadError fails the test."""
    reference = put_file(shm, content)
    with contextlib.suppress(errors.PayloadError), shm.open(reference) as payload:
        for item in payload.items:
            for found in item.tensors.values():
                assert all(type(side) is int and side >= 0 for side in found.shape)
                assert found.nbytes <= len(content)
                assert not found.nbytes or bytes(found.buffer) in content


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
SIDES = st.integers(-3, 5) | st.integers(-(2**70), 2**70) | JSON_VALUES
TENSORS = st.tuples(st.sampled_from(list(ITEM_BYTES)) | JSON_VALUES, st.lists(SIDES, max_size=3) | JSON_VALUES, SIDES)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "data": JSON_VALUES,
        "tensors": st.dictionaries(st.text(max_size=3), TENSORS.map(list) | JSON_VALUES, max_size=3) | JSON_VALUES,
    },
)
HEADERS = JSON_VALUES | st.fixed_dictionaries({"items": st.lists(ENTRIES | JSON_VALUES, max_size=3) | JSON_VALUES})
PATIENT = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


@PATIENT
@given(header=HEADERS, body=st.binary(max_size=200))
@example(header=[], body=b"")
@example(header={"items": [[]]}, body=b"")
@example(header={"items": [{"data": {}, "tensors": []}]}, body=b"")
@example(header={"items": [{"data": {}, "tensors": {"x": ["uint8", [-1, -1], 0]}}]}, body=b"abc")
@example(header={"items": [{"data": {}, "tensors": {"x": ["uint8", [4], -8]}}]}, body=b"abc")
@example(header={"items": [{"data": {}, "tensors": {"x": ["uint8", [4], 2]}}]}, body=b"abc")
@example(header={"items": [{"data": {}, "tensors": {"x": [["uint8"], [4], 0]}}]}, body=b"abcd")
@example(header={"items": [{"data": {}, "tensors": {"x": ["uint8", [True], 0]}}]}, body=b"abcd")
@example(header={"items": [{"data": {}, "tensors": {"x": ["uint8", [2.0], 0]}}]}, body=b"abcd")
@example(header={"items": [{"data": {}, "tensors": {"x": ["uint8", [0], 2**62]}}]}, body=b"abcd")
def test_no_header_makes_a_reader_do_anything_but_read_within_the_file_or_refuse(
    shm: PayloadStore, header: Any, body: bytes
) -> None:
    open_or_refuse(shm, framed(header, body))


@PATIENT
@given(content=st.binary(max_size=300) | st.binary(max_size=300).map(lambda rest: b"OQP1" + rest))
@example(content=b"")
@example(content=b"OQP1")
@example(content=b"OQP1\xff\xff\xff\xff{}")
@example(content=framed(b"[" * 5000 + b"]" * 5000))
@example(content=framed(b'{"items": [' + b"9" * 5000 + b"]}"))
@example(content=framed(b'{"items": "\xff"}'))
@example(content=framed({"items": []}, length=0))
@example(content=framed({"items": []}, length=2**31))
def test_no_bytes_make_a_reader_do_anything_but_refuse(shm: PayloadStore, content: bytes) -> None:
    open_or_refuse(shm, content)


@PATIENT
@given(data=st.data())
def test_a_payload_with_flipped_bytes_is_read_within_the_file_or_refused(
    shm: PayloadStore, data: st.DataObject
) -> None:
    reference = shm.put(shm.name("f" * 32, 0, 1), [Item({"a": 1}, {"x": tensor("float32", (3, 3))})])
    content = bytearray((shm.directory / reference.name).read_bytes())
    for position in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=8)):
        content[position] = data.draw(st.integers(0, 255))
    open_or_refuse(shm, bytes(content))


def test_a_payload_cut_anywhere_is_refused(shm: PayloadStore) -> None:
    reference = shm.put(shm.name("a" * 32, 0, 1), [Item({}, {"x": tensor("uint8", (100,))})])
    for size in range(reference.nbytes):
        os.truncate(shm.directory / reference.name, reference.nbytes - size - 1)
        for said in (reference, dataclasses.replace(reference, nbytes=reference.nbytes - size - 1)):
            with pytest.raises(errors.PayloadError), shm.open(said):
                raise AssertionError(f"opened with {reference.nbytes - size - 1} bytes")


def test_a_pickle_in_a_payloads_place_is_not_run(shm: PayloadStore, tmp_path: Path) -> None:
    import pickle

    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "sprung"),)

    for content in (pickle.dumps(Trap()), framed(pickle.dumps(Trap())), b"OQP1" + pickle.dumps(Trap())):
        open_or_refuse(shm, content)
    assert not (tmp_path / "sprung").exists()


# -- over time ---------------------------------------------------------------------------------------------------------


def test_two_thousand_payloads_with_every_second_reader_raising_leave_nothing_behind(shm: PayloadStore) -> None:
    def one(number: int) -> None:
        reference = shm.put(shm.name(f"{number:032x}", 0, 1), items(20_000))
        try:
            with contextlib.suppress(ZeroDivisionError), shm.open(reference) as payload:
                assert payload.items[0].tensors["x"].nbytes == 20_000
                number // (number % 2)
        finally:
            shm.release([reference.name])

    for number in range(200):
        one(number)
    gc.collect()
    files, memory = support.open_files(), support.resident_kib()
    for number in range(2000):
        one(number)
    gc.collect()
    assert support.open_files() == files
    assert support.resident_kib() - memory < 4096  # 2,000 payloads would be 40,000
    assert shm.names() == []


def test_threads_write_and_read_at_once_without_mixing_their_bytes(shm: PayloadStore) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        for attempt in range(50):
            content = bytes([number]) * 5000
            name = shm.name(f"{number:032x}", 0, attempt)
            reference = shm.put(name, [Item({"n": number}, {"x": Tensor("uint8", (5000,), content)})])
            with shm.open(reference) as payload:
                if bytes(payload.items[0].tensors["x"].buffer) != content or payload.items[0].data["n"] != number:
                    wrong.append(name)
            shm.release([name])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert shm.names() == []
    assert shm.written_bytes > 8 * 50 * 5000
