"""Fixtures that several folders share: a real Valkey, the tiny checkpoint, and what vLLM-Omni makes of it in one go."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from omniqueue import demo, embedded
from tests.engines import handover, reference

# No time limit for a single example: machines are shared. The same examples in every run: a failure is the commit's.
hypothesis.settings.register_profile("omniqueue", deadline=None, derandomize=True)
hypothesis.settings.load_profile("omniqueue")


@pytest.fixture(scope="session")
def valkey() -> Iterator[str]:
    """The URL of an embedded Valkey; tests keep apart by namespaces."""
    with tempfile.TemporaryDirectory(prefix="oq-") as folder:
        server = embedded.EmbeddedValkey(Path(folder), append_only=False)
        server.start()
        try:
            yield server.url
        finally:
            server.stop()


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    return demo.tiny_model()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference.write_small("smollm2", tmp_path_factory.mktemp("smollm2") / "smollm2")


@pytest.fixture(scope="session")
def native_reference(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> reference.NativeReference:
    return reference.run_native(checkpoint, tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> handover.References:
    """For pipelines of tests/engines/handover_cases.py, by name."""
    return handover.References(tmp_path_factory.mktemp("references"))
