"""Memory that is written again: never while anybody may still read it, and given back when it is idle."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from omniqueue import errors, payloads, segments
from omniqueue.payloads import Item, PayloadStore, Reference, Tensor
from tests.unit import support

SIZE = 1 << 20


def put(shm: PayloadStore, job: str, fill: int = 1, size: int = SIZE) -> Reference:
    content = bytes([fill]) * size
    return shm.put(shm.name(job * 32, 0, 1), [Item({"fill": fill}, {"x": Tensor("uint8", (size,), content)})])


def content(shm: PayloadStore, reference: Reference) -> set[int]:
    with shm.open(reference) as payload:
        (item,) = payload.items
        found = set(bytes(item.tensors["x"].buffer))
        assert item.data == {"fill": next(iter(found))}
        return found


def inode(shm: PayloadStore, reference: Reference) -> int:
    return os.stat(shm.directory / reference.name).st_ino


def owned(shm: PayloadStore) -> list[str]:
    """The segments' own names."""
    return [name for name in os.listdir(shm.directory) if name not in shm.names()]


def test_a_released_segment_is_written_again(shm: PayloadStore) -> None:
    first = put(shm, "a", 1)
    place = inode(shm, first)
    shm.release([first.name])
    second = put(shm, "b", 2)
    assert inode(shm, second) == place
    assert content(shm, second) == {2}
    assert len(owned(shm)) == 1


def test_a_payload_that_is_not_released_is_never_written_again(shm: PayloadStore) -> None:
    references = [put(shm, "abc"[k], k) for k in range(3)]
    assert len({inode(shm, reference) for reference in references}) == 3
    assert [content(shm, reference) for reference in references] == [{0}, {1}, {2}]


def test_whoever_releases_it(shm: PayloadStore) -> None:
    first = put(shm, "a")
    place = inode(shm, first)
    subprocess.run(
        [sys.executable, "-c", "import os, sys; os.unlink(sys.argv[1])", shm.directory / first.name], check=True
    )
    assert inode(shm, put(shm, "b")) == place


def test_a_view_that_outlives_its_payload_keeps_what_it_shows(shm: PayloadStore) -> None:
    first = put(shm, "a", 1)
    with shm.open(first) as payload:
        view = payload.items[0].tensors["x"].buffer
    del payload
    shm.release([first.name])
    second = put(shm, "b", 2)
    assert set(bytes(view)) == {1}
    assert content(shm, second) == {2}
    del view
    shm.release([second.name])
    assert len({inode(shm, put(shm, job, 3)) for job in "cd"}) == 2  # both are free again
    assert len(owned(shm)) == 2


def test_another_process_that_reads_keeps_it_too(shm: PayloadStore) -> None:
    first = put(shm, "a", 1)
    script = (
        "import sys; from omniqueue.payloads import *\n"
        "store = PayloadStore('cafe0123', sys.argv[1], host='here')\n"
        "with store.open(Reference(sys.argv[2], int(sys.argv[3]), 'here')) as payload:\n"
        "    print('open', flush=True); sys.stdin.readline()\n"
        "    print(sorted(set(bytes(payload.items[0].tensors['x'].buffer))), flush=True)\n"
    )
    command = [sys.executable, "-c", script, str(shm.directory), first.name, str(first.nbytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdin is not None
        assert reader.stdout.readline() == "open\n"
        place = inode(shm, first)
        shm.release([first.name])
        second = put(shm, "b", 2)
        assert inode(shm, second) != place
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "[1]\n"
    assert inode(shm, put(shm, "c", 3)) == place


@pytest.mark.parametrize(
    ("size", "same"), [(SIZE, True), (SIZE * 6 // 10, True), (SIZE * 4 // 10, False), (SIZE + 1, False)]
)
def test_a_segment_is_used_for_what_about_fills_it(shm: PayloadStore, size: int, same: bool) -> None:
    first = put(shm, "a")
    place = inode(shm, first)
    shm.release([first.name])
    second = put(shm, "b", 7, size)
    assert (inode(shm, second) == place) is same
    assert content(shm, second) == {7}


def test_a_small_payload_is_a_file_of_its_own(shm: PayloadStore) -> None:
    put(shm, "a", size=1000)
    assert owned(shm) == []


def test_the_same_name_written_twice_holds_what_was_written_last(shm: PayloadStore) -> None:
    put(shm, "a", 1)
    assert content(shm, put(shm, "a", 2)) == {2}
    assert len(shm.names()) == 1


def test_idle_memory_is_given_back_and_used_memory_is_not(shm: PayloadStore) -> None:
    files = support.open_files()
    kept, released = put(shm, "a", 1), put(shm, "b", 2)
    shm.release([released.name])
    shm.trim(60.0)
    assert len(owned(shm)) == 2
    shm.trim(0.0)
    assert len(owned(shm)) == 1
    assert content(shm, kept) == {1}
    shm.release([kept.name])
    shm.trim(0.0)
    assert os.listdir(shm.directory) == []
    assert support.open_files() == files


def test_closing_keeps_payloads_and_nothing_else(shm: PayloadStore) -> None:
    files = support.open_files()
    kept, released = put(shm, "a", 1), put(shm, "b", 2)
    shm.release([released.name])
    shm.close()
    assert os.listdir(shm.directory) == [kept.name]
    assert content(shm, kept) == {1}
    assert support.open_files() == files
    assert content(shm, put(shm, "c", 3)) == {3}  # it may write again


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "ORPHAN_S", -1.0)


def test_what_a_killed_writer_kept_is_swept_and_its_payloads_stay(shm: PayloadStore, old: None) -> None:
    script = (
        "import os, sys; from omniqueue.payloads import *\n"
        "store = PayloadStore('cafe0123', sys.argv[1], host='here')\n"
        "item = Item({'fill': 1}, {'x': Tensor('uint8', (1 << 20,), bytes([1]) * (1 << 20))})\n"
        "kept, released = (store.put(store.name(job * 32, 0, 1), [item]) for job in 'ab')\n"
        "store.release([released.name])\n"
        "print(kept.nbytes, flush=True); os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(shm.directory)], stdout=subprocess.PIPE, check=False)
    assert len(owned(shm)) == 2
    shm.sweep(lambda ids: ids, min_age_s=0)
    kept = Reference(shm.name("a" * 32, 0, 1), int(killed.stdout), "here")
    assert len(owned(shm)) == 1
    assert content(shm, kept) == {1}
    assert shm.resident_bytes() == os.stat(shm.directory / kept.name).st_size
    assert shm.sweep(lambda ids: set(), min_age_s=0) == [kept.name]
    shm.sweep(lambda ids: ids, min_age_s=0)
    assert os.listdir(shm.directory) == []


def test_a_live_writers_memory_is_not_swept_within_its_time(shm: PayloadStore) -> None:
    shm.release([put(shm, "a").name])
    shm.sweep(lambda ids: set(), min_age_s=0)
    assert len(owned(shm)) == 1


def test_a_writer_whose_segment_was_swept_takes_another(shm: PayloadStore, old: None) -> None:
    shm.release([put(shm, "a", 1).name])
    shm.sweep(lambda ids: set(), min_age_s=0)
    assert content(shm, put(shm, "b", 2)) == {2}
    shm.trim(60.0)
    assert len(owned(shm)) == 1


def test_a_payload_whose_segments_name_was_swept_is_not_written_over(shm: PayloadStore) -> None:
    kept = put(shm, "a", 1)
    for name in owned(shm):  # as a sweep that looked a moment before the link was made
        os.unlink(shm.directory / name)
    put(shm, "b", 2)
    assert content(shm, kept) == {1}


def test_memory_kept_for_later_makes_room_for_what_comes_now(
    shm: PayloadStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    shm.release([put(shm, "a").name])
    room = 4 * SIZE

    def free(self: PayloadStore) -> int:
        return room - sum(os.stat(path).st_size for path in Path(shm.directory).iterdir())

    monkeypatch.setattr(PayloadStore, "free_bytes", free)
    put(shm, "b", 2, 5 * SIZE // 2)
    with pytest.raises(errors.NoRoom):
        put(shm, "c", 3, 3 * SIZE)


@pytest.mark.parametrize("call", ["posix_fallocate", "link"])
def test_a_write_that_fails_leaves_no_payload_and_its_memory_is_used_again(
    shm: PayloadStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    files = support.open_files()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, support.raising(OSError(5, "Input/output error")))
        with pytest.raises(errors.PayloadError, match="Input/output error"):
            put(shm, "a", 1)
    assert shm.names() == []
    assert content(shm, put(shm, "b", 2)) == {2}
    assert len(owned(shm)) == 1
    shm.close()
    assert support.open_files() == files


def test_many_threads_never_share_a_segment(shm: PayloadStore) -> None:
    faults: list[str] = []

    def writer(number: int) -> None:
        for round_ in range(30):
            reference = put(shm, f"{number:x}", (number * 30 + round_) % 256, payloads._RECYCLED_BYTES)
            found = content(shm, reference)
            if found != {(number * 30 + round_) % 256}:
                faults.append(f"{number}: {found}")
            shm.release([reference.name])

    threads = [threading.Thread(target=writer, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert len(owned(shm)) <= 8
