"""omniqueue status: what it shows of a real Valkey's records, and which stage it blames."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from omniqueue import catalog, cli, errors, local, status, up
from omniqueue.pipeline import Pipeline
from omniqueue.store import Store
from tests.unit import support
from tests.web.support import announce


@pytest.fixture
def pipe() -> Pipeline:
    return support.pipeline(2)


def look(records: Store, pipe: Pipeline) -> status.Status:
    return status.look(catalog.Catalog((pipe,)), records)


def row(text: str, stage_id: int) -> list[str]:
    return text.splitlines()[1 + stage_id].split()


def done(records: Store, pipe: Pipeline) -> None:
    held = support.claim(records, pipe, support.submit(records, pipe))
    records.finish(held, None, {}, None)


def test_an_empty_deployment_has_a_row_per_stage(records: Store, pipe: Pipeline) -> None:
    text = status.as_text(look(records, pipe))
    assert row(text, 0) == [pipe.name, "0", "part0", "-", "0", "-", "0/0", "0", "0", "-", "-"]
    assert f"{pipe.name}: 0 in hand; 0 succeeded, 0 failed, 0 cancelled, 0 expired" in text
    assert "holds it back" not in text


def test_queues_workers_ends_and_rates_are_shown(records: Store, pipe: Pipeline) -> None:
    announce(records, pipe, 0, worker="a")
    announce(records, pipe, 0, worker="b", phase="loading", detail="weights")
    done(records, pipe)
    before = look(records, pipe)
    done(records, pipe)
    records.fail(support.claim(records, pipe, support.submit(records, pipe)), "engine_error", "r", retry=False)
    support.claim(records, pipe, support.submit(records, pipe))
    support.submit(records, pipe)
    time.sleep(0.05)
    seen = look(records, pipe)
    text = status.as_text(seen, before)
    _, _, _, *cells = row(text, 0)
    assert cells[:4] == ["1", "ready,", "1", "loading"]
    assert cells[4] == "1"
    assert cells[7:10] == ["1/4", "2", "1"]
    assert float(cells[10]) > 0
    assert "b is loading: weights" in text
    data = json.loads(json.dumps(status.as_json(seen)))
    (told,) = data["pipelines"]
    assert (told["live"], told["stages"][0]["ends"]) == (4, {"done": 2, "engine_error": 1})
    assert told["stages"][1]["waiting"] == 2
    assert {worker["worker"] for worker in data["workers"]} == {"a", "b"}


def test_the_stage_that_holds_the_others_back_is_named_with_what_to_do(records: Store, pipe: Pipeline) -> None:
    announce(records, pipe, 0, worker="a")
    announce(records, pipe, 1, worker="b")
    ids = [support.submit(records, pipe) for _ in range(3)]
    assert status.holds_back(look(records, pipe), look(records, pipe).overviews[0]) is None  # they have only come
    support.earlier(records, pipe, ids[0], 0, 34.0)
    text = status.as_text(look(records, pipe))
    assert "Stage 0 (part0) holds it back: 3 wait, the oldest for 34 s; add a worker" in text
    assert f"-Q {pipe.stages[0].queue}" in text


def test_a_stage_without_a_worker_is_to_blame_before_one_that_is_slow(records: Store, pipe: Pipeline) -> None:
    announce(records, pipe, 0, worker="a")
    done(records, pipe)
    job_id = support.submit(records, pipe)
    support.earlier(records, pipe, job_id, 0, 100.0)
    text = status.as_text(look(records, pipe))
    assert "Stage 1 (part1) holds it back: 1 wait" in text
    assert "it has no worker that is ready; start one" in text


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def deployment(valkey: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REDIS_URL", "STAGE_CONFIGS_PATH", "MODEL", "NAMESPACE"):
        monkeypatch.setenv(f"OMNIQUEUE_{name}", "")  # what main sets goes with the test
    monkeypatch.setenv("OMNIQUEUE_NAMESPACE", "status-test")
    monkeypatch.setenv("OMNIQUEUE_REDIS_URL", valkey)


@pytest.mark.usefixtures("deployment")
def test_the_command_shows_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "fake_three_stages.yaml"]) == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()[1:4]] == ["writer", "layout", "painter"]
    assert cli.main(["status", "fake_three_stages.yaml", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["pipelines"]
    assert [stage["queue"] for stage in told["stages"]] == ["stage0", "stage1", "stage2"]


@pytest.mark.usefixtures("deployment")
def test_watching_goes_on_over_an_outage_until_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            monkeypatch.setattr(status, "look", support.raising(errors.BrokerUnavailable()))
        if looks == 2:
            monkeypatch.undo()
            monkeypatch.setattr("time.sleep", support.raising(KeyboardInterrupt()))

    monkeypatch.setattr("time.sleep", sleep)
    assert cli.main(["status", "fake_image.yaml", "--watch", "--interval", "0.1"]) == 130
    out = capsys.readouterr().out
    assert out.count("in hand") == 2
    assert "Redis does not answer" in out


@pytest.mark.usefixtures("deployment")
@pytest.mark.parametrize("arguments", [("--interval", "0"), ("--interval", "soon"), ("--port", "0")])
def test_bad_options_are_status_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["status", "fake_image.yaml", *arguments])
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_redis_away_is_a_sentence_and_status_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMNIQUEUE_STAGE_CONFIGS_PATH", "")
    monkeypatch.setenv("OMNIQUEUE_REDIS_URL", "")
    assert cli.main(["status", "fake_image.yaml", "--redis-url", f"unix://{tmp_path}/none"]) == 1
    assert "Redis does not answer" in capsys.readouterr().err


def test_a_running_up_is_found_by_its_port_and_only_while_it_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert local.told(tmp_path) == {}
    machine = up.Machine(up.Options(config="fake_image", run_dir=tmp_path), lambda line: None)
    machine._claim_folder()
    local.tell(tmp_path, {"OMNIQUEUE_REDIS_URL": "unix:///x"})
    assert local.told(tmp_path) == {"OMNIQUEUE_REDIS_URL": "unix:///x"}
    machine.stop()
    assert local.told(tmp_path) == {}
