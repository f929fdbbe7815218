"""The command line: what it refuses, with which status, and what it becomes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from omniqueue import __version__, cli, errors, up
from tests.unit import support

GOOD = "fake_three_stages.yaml"


class Became(BaseException):
    """What os.execv would have become."""


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    commands: list[list[str]] = []

    def execv(path: str, command: list[str]) -> None:
        assert path == command[0]
        commands.append(command)
        raise Became

    monkeypatch.setattr(os, "execv", execv)
    for name in ("STAGE_CONFIGS_PATH", "MODEL", "SERVED_MODEL_NAME"):  # what main sets goes with the test
        monkeypatch.setenv(f"OMNIQUEUE_{name}", "")
    return commands


def run(*arguments: str) -> int:
    """The exit status, argparse's own included."""
    try:
        return cli.main(arguments)
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 1


def commands() -> dict[str, argparse.ArgumentParser]:
    found: dict[str, argparse.ArgumentParser] = {}
    for action in cli.build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


# -- the form of one part ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--stage-id", "0", "--omni-router", "--stage-configs-path", GOOD), "exclude each other"),
        (("--stage-id", "0", "--omni-router"), "exclude each other"),
        (("--stage-id", "0"), "--stage-id needs --stage-configs-path"),
        (("--omni-router",), "--omni-router needs --stage-configs-path"),
        (("--stage-id", "7", "--stage-configs-path", GOOD), "has no stage 7; it has [0, 1, 2]"),
        (("--stage-id", "-1", "--stage-configs-path", GOOD), "has no stage -1"),
        (("--stage-id", "one", "--stage-configs-path", GOOD), "invalid int value"),
        (("--stage-id", "0", "--stage-configs-path", "no_such.yaml"), "no stage config no_such.yaml"),
        (("--omni-router", "--stage-configs-path", GOOD, "--port", "0"), "--port"),
        (("--omni-router", "--stage-configs-path", GOOD, "--port", "65536"), "--port"),
        (("--omni-router", "--stage-configs-path", GOOD, "--port", "http"), "--port"),
        (("--stage-configs-path", GOOD), "--stage-id"),
        ((), "usage: omniqueue"),
        (("serve",), "invalid choice"),
        (("--no-such-flag",), "unrecognized arguments"),
    ],
)
def test_a_wrong_command_line_is_status_2_and_says_what_is_wrong(
    arguments: tuple[str, ...], says: str, became: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert says in capsys.readouterr().err
    assert became == []


@pytest.mark.parametrize("stage_id", [0, 1, 2])
def test_a_stage_id_becomes_that_stages_celery_worker(stage_id: int, became: list[list[str]]) -> None:
    with pytest.raises(Became):
        run("--stage-id", str(stage_id), "--stage-configs-path", GOOD, "--model", "org/m", "--served-model-name", "a,b")
    (command,) = became
    assert command[:8] == [sys.executable, "-m", "celery", "-A", "omniqueue", "worker", "-Q", f"stage{stage_id}"]
    assert Path(os.environ["OMNIQUEUE_STAGE_CONFIGS_PATH"]).name == GOOD
    assert Path(os.environ["OMNIQUEUE_STAGE_CONFIGS_PATH"]).is_absolute()
    assert (os.environ["OMNIQUEUE_MODEL"], os.environ["OMNIQUEUE_SERVED_MODEL_NAME"]) == ("org/m", "a,b")


def test_the_router_flag_becomes_the_router_on_the_address_that_was_given(became: list[list[str]]) -> None:
    with pytest.raises(Became):
        run("--omni-router", "--stage-configs-path", GOOD, "--host", "0.0.0.0", "--port", "8123")
    assert became == [up.router_command("0.0.0.0", 8123)]
    assert "0.0.0.0:8123" in became[0]


# -- commands ----------------------------------------------------------------------------------------------------------


def test_there_are_the_commands_that_the_design_names() -> None:
    assert {"up", "demo", "validate", "doctor", "status"} <= commands().keys()


@pytest.mark.parametrize("command", [None, *commands()])
def test_every_command_explains_itself(command: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*filter(None, [command]), "--help") == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: omniqueue")
    assert "None" not in text


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"omniqueue {__version__}\n"


@pytest.mark.parametrize("text", ["0=2", "stage1=3"])
def test_replicas_are_given_by_stage(text: str) -> None:
    options = cli.build_parser().parse_args(["up", GOOD, "--replicas", text, "--replicas", "2=1"])
    assert dict(options.replicas) == {int(text.removeprefix("stage")[0]): int(text[-1]), 2: 1}


@pytest.mark.parametrize("text", ["", "2", "=2", "0=", "0=0", "0=-1", "0=65", "a=1", "0=b", "0=1.5", "0:2", "0=1=2"])
def test_bad_replicas_are_status_2(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("up", GOOD, "--replicas", text) == 2
    assert "--replicas" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"), [(errors.ConfigError("bad"), 2), (errors.NotReady("bad"), 1), (errors.NoRoom("bad"), 1)]
)
def test_our_errors_are_a_line_and_a_status_not_a_traceback(
    error: errors.OmniqueueError, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(up, "running", support.raising(error))
    assert run("up", GOOD) == status
    assert capsys.readouterr().err == "omniqueue: bad\n"


# -- validate ----------------------------------------------------------------------------------------------------------


def test_validate_shows_the_plan_of_a_good_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("validate", GOOD) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("fake_three_stages", "writer", "layout", "painter", "stage2", "lease_s 5"))


def test_validate_shows_the_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("validate", GOOD, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert [stage["name"] for stage in plan["stages"]] == ["writer", "layout", "painter"]


def test_validate_tells_every_fault_of_a_bad_file_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(
        "pipeline: mine\nstages:\n  - stage_id: 0\n    engine: fake\n    enginee_args: {}\n    max_num_seq: 2\n"
    )
    assert run("validate", str(bad)) == 2
    text = capsys.readouterr().err
    assert f"{bad}:5: stages[0].enginee_args" in text
    assert "engine_args" in text
    assert f"{bad}:6: stages[0].max_num_seq" in text
    assert "max_num_seqs" in text


def test_validate_imports_an_engine_of_the_users_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("pipeline: mine\nstages:\n  - {stage_id: 0, engine: 'no_such_module:Engine'}\n")
    assert run("validate", str(mine)) == 2
    assert "no_such_module:Engine cannot be imported" in capsys.readouterr().err


def test_validate_of_a_file_that_is_missing_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("validate", "fake_imag.yaml") == 2
    assert "fake_image" in capsys.readouterr().err


def test_the_celery_command_with_a_bad_environment_says_which_variable_and_ends_with_status_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "omniqueue", "worker", "-Q", "stage0"],
        env={**os.environ, "OMNIQUEUE_REDIS_URL": "http://nowhere"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "OMNIQUEUE_REDIS_URL" in done.stderr
    assert "Traceback" not in done.stderr
