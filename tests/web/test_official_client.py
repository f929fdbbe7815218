"""The official client against keys, rates and edits; tests/pipeline/ has it against real models."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from omniqueue import params
from tests.unit.test_pictures import encoded
from tests.web import support
from tests.web.support import Router

PNG = encoded("RGB", (64, 32))


@dataclasses.dataclass
class Locked:
    """A router that wants a key and takes five requests a minute of each."""

    router: Router
    url: str

    def client(self, key: str = "sk-one") -> Any:
        """An openai.OpenAI; Any, since its types know OpenAI's own sizes only."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)


@pytest.fixture
def locked(valkey: str, tmp_path: Path) -> Iterator[Locked]:
    pipe = dataclasses.replace(support.pipeline(), max_images=4, extra_fields=params.EXTRA_FIELDS)
    options: dict[str, Any] = {"api_keys": ("sk-one", "sk-two"), "rate_limit": "5/minute"}
    running = support.running(valkey, tmp_path, pipe, **options)
    with running as router, support.Workers(router), support.listening(router.application) as url:
        yield Locked(router, url)


def test_without_the_right_key_it_is_an_authentication_error(locked: Locked) -> None:
    with locked.client("sk-wrong") as client, pytest.raises(openai.AuthenticationError) as refused:
        client.images.generate(prompt="An apple", model=locked.router.pipe.name)
    assert refused.value.code == "invalid_api_key"
    assert not locked.router.enqueued()


def test_too_many_requests_are_a_rate_limit_error_that_says_when_to_come_back(locked: Locked) -> None:
    with locked.client() as client:
        for _ in range(5):
            assert client.images.generate(prompt="An apple").data[0].b64_json
        with pytest.raises(openai.RateLimitError) as refused:
            client.images.generate(prompt="An apple")
        assert 0 < int(refused.value.response.headers["Retry-After"]) <= 60
        assert [model.id for model in client.models.list()] == [locked.router.pipe.name]
    with locked.client("sk-two") as other:
        assert other.images.generate(prompt="An apple").data[0].b64_json


def test_pictures_are_edited(locked: Locked) -> None:
    with locked.client() as client:
        one = client.images.edit(image=("a.png", PNG), prompt="Make it red", size="32x48")
        assert Image.open(io.BytesIO(base64.b64decode(one.data[0].b64_json))).size == (32, 48)
        several = client.images.edit(
            image=[("a.png", PNG), ("b.png", encoded("L", (8, 8)))],
            mask=("m.png", encoded("RGBA", (64, 32))),
            prompt="Make it red",
            n=2,
            extra_body={"seed": 7, "strength": 0.5},
        )
        assert [entry.seed for entry in several.data] == [7, 8]
        with pytest.raises(openai.BadRequestError) as refused:
            client.images.edit(image=("a.png", PNG[:40]), prompt="Make it red")
        assert (refused.value.param, refused.value.code) == ("image", "invalid_image")
        with pytest.raises(openai.BadRequestError) as refused:
            client.images.edit(image=("a.png", PNG), prompt="Make it red", input_fidelity="high")
        assert refused.value.param == "input_fidelity"
