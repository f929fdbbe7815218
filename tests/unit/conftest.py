"""A namespace in the shared Valkey, and a folder in shared memory, for each test that asks."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator

import pytest

from omniqueue import celery_app, payloads, settings, store


@pytest.fixture
def records(valkey: str) -> Iterator[store.Store]:
    """A store whose namespace is new; its keys go with the test."""
    client = store.connect(valkey, 5.0)
    fresh = store.Store(client, f"t{uuid.uuid4().hex[:8]}")
    try:
        yield fresh
    finally:
        for key in client.scan_iter(f"{fresh.namespace}:*", count=1000):
            client.delete(key)
        client.close()


@pytest.fixture
def shm() -> Iterator[payloads.PayloadStore]:
    """A payload store in a folder of its own in shared memory."""
    with tempfile.TemporaryDirectory(prefix="oqtest-", dir="/dev/shm") as folder:
        store = payloads.PayloadStore("cafe0123", folder, host="here")
        yield store
        store.close()


@pytest.fixture
def broker(valkey: str) -> Iterator[None]:
    """Celery's app publishes to the shared Valkey; it keeps a pool of producers for the first broker it met."""
    celery_app.publish_only(settings.Settings(redis_url=valkey, redis_timeout_s=5.0))
    celery_app.app.__dict__.pop("amqp", None)
    yield
    celery_app.app.__dict__.pop("amqp", None)
