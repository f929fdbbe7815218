"""A picture in a terminal, and when there is none."""

from __future__ import annotations

import io

import pytest

from omniqueue import terminal
from omniqueue.payloads import Tensor


class Screen(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_screen_shows_pictures_and_a_file_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert terminal.shows_pictures(Screen())
    assert not terminal.shows_pictures(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.shows_pictures(Screen())


def test_two_pixels_are_one_character() -> None:
    picture = Tensor("uint8", (2, 2, 3), bytes([255, 0, 0, 0, 255, 0, 0, 0, 255, 9, 9, 9]))
    [line] = terminal.picture_lines(picture)
    assert line == "\x1b[38;2;255;0;0;48;2;0;0;255m▀\x1b[38;2;0;255;0;48;2;9;9;9m▀\x1b[0m"


def test_a_large_picture_is_made_to_fit() -> None:
    lines = list(terminal.picture_lines(Tensor("uint8", (192, 320, 3), bytes(192 * 320 * 3)), columns=40))
    assert len(lines) == 12
    assert {line.count("▀") for line in lines} == {40}
