"""The page, driven in a headless Chromium against real workers.

With OMNIQUEUE_SCREENSHOTS=docs the pictures in docs/ are made anew.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.process import cluster
from tests.process.cluster import Cluster, eventually
from tests.web import fuzz, support

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--window-size=1200,900",
)  # fmt: skip
SCREENSHOTS = os.environ.get("OMNIQUEUE_SCREENSHOTS")
ROOT = Path(__file__).parents[2]


class Page:
    """The page in a browser."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url
        driver.get(url)
        eventually(lambda: self.find("#model option"))

    def find(self, selector: str) -> list[Any]:
        found: list[Any] = self.driver.find_elements(By.CSS_SELECTOR, selector)
        return found

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return str(self.one(selector).text)

    def script(self, text: str) -> Any:
        return self.driver.execute_script(text)

    def fill(self, **values: str) -> None:
        for name, value in values.items():
            self.one(f"#{name}").clear()
            self.one(f"#{name}").send_keys(value)

    def says(self, text: str, where: str = "#status", timeout_s: float = 30.0) -> None:
        """Wait until it says so."""
        with contextlib.suppress(AssertionError):
            eventually(lambda: text in self.text(where), timeout_s)
        assert text in self.text(where)

    def shoot(self, name: str) -> None:
        """Keep a picture of it, when asked to."""
        if SCREENSHOTS:
            self.driver.save_screenshot(str(ROOT / SCREENSHOTS / f"{name}.png"))

    def complaints(self) -> list[str]:
        """Errors in the browser's console, except for answers that were meant to be refused."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE" and "the server responded with a status of" not in entry["message"]
        ]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    binary, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    assert binary, "the page's tests need a browser: apt-get install chromium chromium-driver"
    assert chromedriver, "the page's tests need a browser: apt-get install chromium chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    made.set_page_load_timeout(30)
    yield made
    made.quit()


@pytest.fixture(scope="module")
def machine() -> Iterator[Cluster]:
    """Two stages; a prompt with "wait" in it runs until it is cancelled."""
    stages = ({"steps": 4, "hang_on": "wait"}, {"steps": 10, "delay_s": 0.05})
    config = cluster.config(*stages, size={"multiple": 16, "default": "256x256"}, served_model_name="fake-image")
    with cluster.running(config) as made:
        made.workers(1, 1)
        made.router()
        yield made


@pytest.fixture
def page(driver: Any, machine: Cluster) -> Page:
    machine.workers(1, 1)
    made = Page(driver, f"http://127.0.0.1:{machine.port}/")
    made.script("localStorage.clear()")
    made.driver.refresh()
    eventually(lambda: made.find("#model option"))
    made.driver.get_log("browser")
    made.says("Every stage has a worker", "#ready")
    return made


def make(page: Page, **values: str) -> None:
    page.fill(**values)
    page.one("#make").click()


def test_a_prompt_is_typed_and_the_picture_seen(page: Page) -> None:
    make(page, prompt="A red apple on a white table", size="256x128", seed="9007199254740993", negative="blur")
    page.says("Done in", timeout_s=60)
    assert "seed 9007199254740993" in page.text("#status")
    image = page.one("#answer img")
    eventually(lambda: page.script("return document.querySelector('#answer img').naturalWidth") == 256)
    assert page.script("return document.querySelector('#answer img').naturalHeight") == 128
    assert image.get_attribute("alt") == "A red apple on a white table"
    rows = [row.text for row in page.find("#times tbody tr")]
    assert len(rows) == 2
    assert all("done" in row and " s " in row for row in rows)
    assert len(page.find("#stages tbody tr")) == 2
    page.shoot("page")
    assert page.complaints() == []


def test_nothing_comes_from_anywhere_else_and_nothing_is_inline(page: Page) -> None:
    make(page, prompt="An apple", size="64x64")
    page.says("Done in", timeout_s=60)
    names = page.script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert names
    assert [name for name in names if not name.startswith((page.url, "data:", "blob:"))] == []
    assert page.script("return [...document.querySelectorAll('script:not([src]), style, [style]')].length") == 0
    injected = "const made = document.createElement('script'); made.textContent = 'window.owned = 1';"
    assert page.script(f"{injected} document.body.append(made); return window.owned") is None


def test_a_running_job_is_cancelled(page: Page, machine: Cluster) -> None:
    make(page, prompt="please wait", size="64x64")
    page.says("Stage 0")
    assert not page.one("#make").is_enabled()
    page.shoot("page-running")
    page.one("#cancel").click()
    page.says("The job was cancelled")
    assert page.one("#make").is_enabled()
    assert machine.store.jobs(machine.pipe.name, 1)[0].state.value == "cancelled"


def test_the_keyboard_is_enough(page: Page) -> None:
    page.script("document.activeElement.blur()")
    seen = []
    for _ in range(20):
        webdriver.ActionChains(page.driver).send_keys(Keys.TAB).perform()
        seen.append(page.script("return document.activeElement.id"))
    order = [name for name in seen if name in ("model", "prompt", "negative", "size", "seed", "make")]
    assert order[:6] == ["model", "prompt", "negative", "size", "seed", "make"]
    page.one("#prompt").send_keys("please wait")
    webdriver.ActionChains(page.driver).key_down(Keys.CONTROL).send_keys(Keys.ENTER).key_up(Keys.CONTROL).perform()
    page.says("Stage 0")
    webdriver.ActionChains(page.driver).send_keys(Keys.ESCAPE).perform()
    page.says("The job was cancelled")


def test_a_refusal_is_told_in_words(page: Page) -> None:
    make(page, prompt="An apple", size="65x64")
    page.says("width and height must be multiples of 16")
    assert page.one("#make").is_enabled()


def test_history_outlives_the_page_and_is_text(page: Page) -> None:
    prompt = "<img src=x onerror=document.title='owned'>"
    make(page, prompt=prompt, size="64x64", seed="3")
    page.says("Done in", timeout_s=60)
    page.driver.refresh()
    eventually(lambda: page.find("#history button"))
    assert prompt in page.text("#history button")
    page.one("#history button").click()
    assert page.one("#prompt").get_attribute("value") == prompt
    assert page.one("#seed").get_attribute("value") == "3"
    eventually(lambda: page.script("return document.querySelector('#answer img')?.naturalWidth") == 64)
    assert page.driver.title == "omniqueue"
    page.one("#forget").click()
    assert page.find("#history button") == []


@pytest.mark.parametrize(
    "kept", ["[null]", '[{"prompt": {}, "kind": "image"}]', '[{"prompt": "x", "kind": "odd"}]', "7", "{"]
)
def test_what_is_no_history_does_not_keep_the_page_from_starting(page: Page, kept: str) -> None:
    page.driver.execute_script("localStorage.setItem('omniqueue.history', arguments[0])", kept)
    page.driver.refresh()
    eventually(lambda: page.find("#model option"))
    page.says("Every stage has a worker", "#ready")
    assert page.find("#history button") == []
    assert page.complaints() == []


def test_a_killed_worker_shows(page: Page, machine: Cluster) -> None:
    queue = machine.pipe.stages[1].queue
    assert "bad" not in page.one(f"tr[data-queue='{queue}'] td:last-child").get_attribute("class")
    [process] = [one for one in machine.processes if one.name == queue and one.alive()]
    process.kill()
    page.says("Stage 1", "#ready")
    page.says("has no worker", "#ready")
    assert page.one(f"tr[data-queue='{queue}'] td:last-child").text == "0"
    page.shoot("page-worker-killed")
    machine.workers(1, 1)
    page.says("Every stage has a worker", "#ready")


def test_a_router_that_is_away_shows_and_comes_back(page: Page, machine: Cluster) -> None:
    [router] = [one for one in machine.processes if one.name == "router" and one.alive()]
    router.terminate()
    page.says("The router does not answer", "#ready")
    machine.router()
    page.says("Every stage has a worker", "#ready")


def test_it_fits_a_phone_and_the_dark(page: Page) -> None:
    light = page.script("return getComputedStyle(document.body).backgroundColor")
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        page.driver.refresh()
        eventually(lambda: page.find("#stages tbody tr"))
        make(page, prompt="A red apple", size="256x256")
        page.says("Done in", timeout_s=60)
        assert page.script("return document.documentElement.scrollWidth") <= 390
        assert page.script("return getComputedStyle(document.body).backgroundColor") != light
        assert page.script("return document.getElementById('make').getBoundingClientRect().height") >= 40
        page.script("window.scrollTo(0, 0)")
        page.shoot("page-phone")
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_every_kind_of_answer_is_shown(driver: Any, valkey: str, tmp_path: Path) -> None:
    with fuzz.serving(valkey, tmp_path) as url:
        page = Page(driver, f"{url}/")
        for model, selector in (
            ("fake-text", "#answer pre"), ("fake-speech", "#answer audio"), ("fake-video", "#answer video"),
            ("fake-image", "#answer img"),
        ):  # fmt: skip
            page.one(f"#model option[value='{model}']").click()
            make(page, prompt="An apple and a pear")
            page.says("Done in", timeout_s=60)
            eventually(functools.partial(page.find, selector))
            if model == "fake-text":
                assert page.text("#answer pre") == "An apple and a pear"
        eventually(lambda: page.script("return document.querySelector('#answer img').naturalWidth"))
        assert page.complaints() == []


def test_with_an_api_key_the_browser_asks_for_it_and_the_page_works(driver: Any, valkey: str, tmp_path: Path) -> None:
    locked = support.running(valkey, tmp_path, support.pipeline(), api_keys=("sk-one",))
    with locked as router, support.Workers(router), support.listening(router.application) as url:
        page = Page(driver, url.replace("//", "//anybody:sk-one@") + "/")
        make(page, prompt="An apple", size="64x64")
        page.says("Done in", timeout_s=60)
        eventually(lambda: page.script("return document.querySelector('#answer img').naturalWidth") == 64)


def test_the_page_of_the_document_shows(driver: Any, machine: Cluster) -> None:
    driver.get(f"http://127.0.0.1:{machine.port}/docs")
    assert "POST /v1/images/generations" in driver.find_element(By.TAG_NAME, "main").text
    assert driver.execute_script("return getComputedStyle(document.querySelector('section')).borderRadius") != "0px"
