"""Physical device ids become positions in what the process sees."""

from __future__ import annotations

import pytest

from omniqueue import errors
from omniqueue.engines import devices


@pytest.mark.parametrize(
    ("wanted", "visible", "logical"),
    [
        ("1", "1", "0"),
        ("1", "0,1", "1"),
        ("3", "2,3", "1"),
        ("2,3", "2,3", "0,1"),
        ("0", "1,0", "1"),
        (" 1 ", " 1 ", "0"),
        ("1", None, "1"),
        ("1", "", "1"),
        ("0", "3", "0"),
        ("0,1", "2,3", "0,1"),
        ("0", "GPU-5e1f,GPU-77aa", "0"),
        ("GPU-77aa", "GPU-5e1f,GPU-77aa", "1"),
        ("1", "2", "0"),
        ("0,2", "4,5", "0,1"),
        (None, "1", None),
    ],
)
def test_ids_are_mapped_into_the_visible_list(wanted: str | None, visible: str | None, logical: str | None) -> None:
    assert devices.logical(wanted, visible) == logical


@pytest.mark.parametrize(("wanted", "visible"), [("2", "0,1"), ("4", "2,3"), ("0,2", "0"), ("gpu", "0,1")])
def test_a_device_that_is_not_visible_is_an_error_that_names_both(wanted: str, visible: str) -> None:
    with pytest.raises(errors.ConfigError, match=f"device {wanted}.*only {visible}"):
        devices.logical(wanted, visible)
