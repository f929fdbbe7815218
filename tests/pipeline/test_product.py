"""The product as a user runs it, with real engines: HTTP in, pictures out, the same pixels as vLLM-Omni in one go."""

from __future__ import annotations

import base64
import io
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
from PIL import Image

from omniqueue import up
from omniqueue.job import Job
from tests.engines.cases import CASES, Case
from tests.engines.reference import NativeReference
from tests.pipeline import conftest
from tests.pipeline.conftest import Product

pytestmark = pytest.mark.engine

NAME = "zai-org/GLM-Image"
GENERATIONS = "/v1/images/generations"


def body(case: Case, **more: Any) -> dict[str, Any]:
    fields = {
        "model": NAME,
        "prompt": case.prompt,
        "size": f"{case.width}x{case.height}",
        "seed": case.seed,
        "num_inference_steps": case.steps,
        "guidance_scale": case.guidance,
        "response_format": "b64_json",
        **more,
    }
    if case.negative_prompt is not None:
        fields["negative_prompt"] = case.negative_prompt
    return fields


def pixels(content: bytes) -> Any:
    with Image.open(io.BytesIO(content)) as picture:
        return numpy.asarray(picture.convert("RGB"))


def picture(product: Product, fields: dict[str, Any]) -> Any:
    status, answer = product.post(GENERATIONS, fields)
    assert status == 200, answer
    return pixels(base64.b64decode(answer["data"][0]["b64_json"]))


def test_the_documented_call_returns_a_url_of_a_picture_of_that_size(product: Product) -> None:
    fields = {
        "model": NAME,
        "prompt": "A red apple on a white table",
        "size": "256x256",
        "response_format": "url",
    }
    status, answer = product.post(GENERATIONS, fields)
    assert status == 200, answer
    url = answer["data"][0]["url"]
    assert url.startswith(f"http://127.0.0.1:{product.port}/v1/files/")
    status, content = product.get(url.removeprefix(f"http://127.0.0.1:{product.port}"))
    assert status == 200
    assert content.startswith(b"\x89PNG")
    assert pixels(content).shape == (256, 256, 3)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pixels_over_http_are_those_of_native_omni(
    case: Case, product: Product, native_reference: NativeReference
) -> None:
    numpy.testing.assert_array_equal(picture(product, body(case)), native_reference.pixels[case.name])


def test_all_cases_at_once_are_still_those_of_native_omni(product: Product, native_reference: NativeReference) -> None:
    with ThreadPoolExecutor(len(CASES)) as clients:
        pictures = list(clients.map(lambda case: picture(product, body(case)), CASES))
    for case, mine in zip(CASES, pictures, strict=True):
        numpy.testing.assert_array_equal(mine, native_reference.pixels[case.name])


def test_a_field_that_the_model_does_not_use_is_said_to_be_unused(product: Product) -> None:
    _, answer = product.post(GENERATIONS, body(CASES[-1], negative_prompt="blurry"))
    assert ["negative_prompt" in line for line in answer["warnings"]] == [True]
    _, answer = product.post(GENERATIONS, body(CASES[-1]))
    assert "warnings" not in answer


def test_several_pictures_are_those_of_successive_seeds(product: Product) -> None:
    case = CASES[0]
    status, answer = product.post(GENERATIONS, body(case, n=2))
    assert status == 200, answer
    assert [entry["seed"] for entry in answer["data"]] == [case.seed, case.seed + 1]
    second = pixels(base64.b64decode(answer["data"][1]["b64_json"]))
    alone = picture(product, {**body(case), "seed": case.seed + 1})
    numpy.testing.assert_array_equal(second, alone)


@pytest.mark.parametrize("output_format", ["jpeg", "webp"])
def test_other_formats_have_the_same_size(output_format: str, product: Product) -> None:
    status, answer = product.post(GENERATIONS, body(CASES[3], output_format=output_format))
    assert status == 200, answer
    with Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"]))) as image:
        assert (image.format, image.size) == (output_format.upper(), (160, 96))


def test_the_record_has_what_each_stage_really_used(product: Product) -> None:
    status, job = product.post("/v1/jobs", {"model": NAME, "prompt": "x", "size": "32x32", "num_inference_steps": 2})
    assert status == 202, job
    deadline = time.monotonic() + 60
    while job["status"] not in ("succeeded", "failed") and time.monotonic() < deadline:
        time.sleep(0.1)
        status, job = product.get(f"/v1/jobs/{job['id']}")
    assert job["status"] == "succeeded", job
    first, second = job["stages"]
    assert first["params"]["temperature"] == 0.6
    assert first["params"]["max_tokens"] == 258
    assert second["params"]["num_inference_steps"] == 2
    assert (second["params"]["width"], second["params"]["height"]) == (32, 32)


def test_a_prompt_too_long_for_the_engine_is_the_clients_fault_and_the_next_request_is_served(product: Product) -> None:
    status, answer = product.post(GENERATIONS, body(CASES[-1], prompt="word " * 6000))
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert picture(product, body(CASES[-1])).shape == (32, 32, 3)


def test_nothing_large_ever_lies_in_redis(product: Product) -> None:
    picture(product, body(CASES[0], size="512x512"))
    client = product.store().client
    sizes = {key: client.memory_usage(key, samples=0) for key in client.scan_iter(count=1000)}
    assert sizes
    assert max(size for size in sizes.values() if size is not None) < 64 * 1024


def test_the_router_is_small_and_holds_no_engine(product: Product) -> None:
    said = re.search(r"router \(pid (\d+)\)", (product.folder / "up.log").read_text())
    assert said
    master = psutil.Process(int(said[1]))
    for router in (master, *master.children()):
        maps = Path(f"/proc/{router.pid}/maps").read_text()
        assert "libtorch" not in maps
        assert router.memory_info().rss < 150 * 2**20


def test_a_second_worker_takes_its_share_at_once_and_sigterm_loses_nothing(product: Product) -> None:
    before = {worker["worker"] for worker in product.store().workers()}
    log = product.folder / "second.log"
    with open(log, "wb") as output:
        second = subprocess.Popen(
            up.worker_command("stage1"), env=product.environment(), stdout=output, stderr=subprocess.STDOUT
        )
    try:
        with ThreadPoolExecutor(4) as clients:
            busy = [clients.submit(picture, product, body(CASES[0], num_inference_steps=40)) for _ in range(4)]
            name = _wait_for_new_worker(product, before, log)
            busy += [clients.submit(picture, product, body(CASES[0], num_inference_steps=40, n=2)) for _ in range(4)]
            assert all(future.result(timeout=120).shape == (64, 64, 3) for future in busy)
        ran = _ran_by(product, name)
        assert ran, "the second worker did nothing"
        with ThreadPoolExecutor(4) as clients:
            busy = [clients.submit(picture, product, body(CASES[0], num_inference_steps=40)) for _ in range(6)]
            time.sleep(2.0)
            second.send_signal(signal.SIGTERM)
            assert all(future.result(timeout=120).shape == (64, 64, 3) for future in busy)
        assert second.wait(timeout=60) == 0, log.read_text()[-3000:]
    finally:
        if second.poll() is None:
            second.kill()
            second.wait()


def _wait_for_new_worker(product: Product, before: set[str], log: Path) -> str:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        for worker in product.store().workers():
            if worker["worker"] not in before and worker["phase"] == "ready":
                return str(worker["worker"])
        time.sleep(0.2)
    raise AssertionError(log.read_text()[-3000:])


def _ran_by(product: Product, worker: str) -> list[str]:
    jobs = product.store().jobs("glm_image", 100)
    return [job.id for job in jobs if any(stage.worker == worker for stage in job.stages)]


def test_kill_9_of_a_stages_only_worker_costs_seconds_and_no_request(
    product: Product, native_reference: NativeReference
) -> None:
    """The chaos of tests/process once with real engines: ``up`` starts the worker again, the picture is the same."""
    worker = next(one for one in product.store().workers() if one["queue"] == "stage1")
    with ThreadPoolExecutor(len(CASES) + 1) as clients:
        long = clients.submit(picture, product, body(CASES[0], num_inference_steps=150))
        pictures = [clients.submit(picture, product, body(case)) for case in CASES]
        deadline = time.monotonic() + 60
        while not any(_runs_long(job) for job in product.store().jobs("glm_image", 20)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        psutil.Process(worker["pid"]).kill()
        for case, future in zip(CASES, pictures, strict=True):
            numpy.testing.assert_array_equal(future.result(timeout=200), native_reference.pixels[case.name])
        assert long.result(timeout=200).shape == (64, 64, 3)
    jobs = product.store().jobs("glm_image", len(CASES) + 1)
    assert {job.stages[0].attempt for job in jobs} == {1}, "the first stage ran again"
    assert [job.stages[1].attempt > 1 for job in jobs if job.request.get("num_inference_steps") == 150] == [True]


def _runs_long(job: Job) -> bool:
    return job.request.get("num_inference_steps") == 150 and job.stages[1].state == "running"


def test_ctrl_c_leaves_no_process_no_payload_and_no_socket(product: Product) -> None:
    """The last test of this folder: it ends the product."""
    pids = conftest.group_of(product.process)
    assert len(pids) > 4
    product.process.send_signal(signal.SIGINT)
    assert product.process.wait(timeout=90) == 0, product.logs()
    deadline = time.monotonic() + 10
    while any(conftest.alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in pids if conftest.alive(pid)] == []
    assert conftest.shm_files(product.settings) == []
    assert [path for path in product.folder.rglob("*") if path.is_socket()] == []


def test_a_config_error_ends_up_with_status_2_before_anything_starts(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("pipeline: glm_image\nstages:\n  - {stage_id: 0, device: '0'}\n")
    done = subprocess.run(
        [sys.executable, "-m", "omniqueue.cli", "up", str(bad), "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "devices" in done.stderr
    assert not (tmp_path / "run" / "valkey.sock").exists()
