"""The environment: what is read, and what a bad value is told."""

from __future__ import annotations

import dataclasses

import pytest

from omniqueue import errors, settings


def test_without_any_variable_the_defaults_stand() -> None:
    assert settings.load({}) == dataclasses.replace(settings.Settings(), media_fs_url=settings.default_media_dir())


def test_an_empty_variable_is_as_good_as_none() -> None:
    names = [f"OMNIQUEUE_{field.name.upper()}" for field in dataclasses.fields(settings.Settings)]
    assert settings.load(dict.fromkeys(names, "")) == settings.load({})


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("REDIS_URL", "unix:///run/valkey.sock?db=2", "unix:///run/valkey.sock?db=2"),
        ("REDIS_URL", "rediss://user:secret@host:6380/1", "rediss://user:secret@host:6380/1"),
        ("BROKER_URL", "amqp://host", "amqp://host"),
        ("NAMESPACE", "mine", "mine"),
        ("STAGE_CONFIGS_PATH", "a.yaml:b.yaml", "a.yaml:b.yaml"),
        ("MODEL", "org/model", "org/model"),
        ("SERVED_MODEL_NAME", "a,b", "a,b"),
        ("SHM_DIR", "/mnt/shm", "/mnt/shm"),
        ("HOST", "node1", "node1"),
        ("MEDIA_FS_URL", "s3://bucket/x", "s3://bucket/x"),
        ("MEDIA_HTTP_URL", "https://cdn/x", "https://cdn/x"),
        ("DRAIN_GRACE_S", "0.5", 0.5),
        ("REDIS_TIMEOUT_S", "3", 3.0),
        ("REPLICA", "0", 0),
        ("REPLICA", "3", 3),
        ("ROUTER_THREADS", "64", 64),
        ("API_KEYS", "one, two", ("one", "two")),
        ("API_KEYS_FILE", "/run/keys", "/run/keys"),
        ("RATE_LIMIT", "60/minute", "60/minute"),
        ("MAX_UPLOAD_BYTES", "1000000", 1_000_000),
        ("ALLOW_REMOTE_MEDIA", "Media.example, *.cdn.example", ("media.example", "*.cdn.example")),
        ("ALLOW_REMOTE_MEDIA", "*", ("*",)),
    ],
)
def test_every_setting_is_read_from_its_variable(name: str, value: str, read: object) -> None:
    assert getattr(settings.load({f"OMNIQUEUE_{name}": value}), name.lower()) == read


def test_there_is_a_variable_for_every_setting() -> None:
    class Asked(dict[str, str]):
        def get(self, key: str, default: object = None) -> None:  # type: ignore[override]
            self[key] = ""

    asked = Asked()
    settings.load(asked)
    assert set(asked) == {f"OMNIQUEUE_{field.name.upper()}" for field in dataclasses.fields(settings.Settings)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REDIS_URL", "localhost:6379"),
        ("REDIS_URL", "http://localhost"),
        ("REDIS_URL", "redis:/localhost"),
        ("REDIS_URL", "redis://localhost:port/0"),
        ("REDIS_URL", "redis://localhost:99999/0"),
        ("REDIS_URL", " "),
        ("BROKER_URL", "  "),
        ("NAMESPACE", "\t"),
        ("DRAIN_GRACE_S", "soon"),
        ("DRAIN_GRACE_S", "0"),
        ("DRAIN_GRACE_S", "-1"),
        ("DRAIN_GRACE_S", "nan"),
        ("DRAIN_GRACE_S", "inf"),
        ("REDIS_TIMEOUT_S", "1s"),
        ("REPLICA", "-1"),
        ("REPLICA", "one"),
        ("REPLICA", "1.0"),
        ("ROUTER_THREADS", "0"),
        ("ROUTER_THREADS", "many"),
        ("SERVED_MODEL_NAME", ","),
        ("SERVED_MODEL_NAME", " , "),
        ("RATE_LIMIT", "60"),
        ("RATE_LIMIT", "0/minute"),
        ("RATE_LIMIT", "60 per minute"),
        ("RATE_LIMIT", "6０/minute"),
        ("MAX_UPLOAD_BYTES", "10"),
        ("MAX_UPLOAD_BYTES", "32 MB"),
        ("ALLOW_REMOTE_MEDIA", "https://media.example"),
        ("ALLOW_REMOTE_MEDIA", "media.example:80"),
        ("ALLOW_REMOTE_MEDIA", ","),
    ],
)
def test_a_bad_value_names_the_key_and_the_value(name: str, value: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        settings.load({f"OMNIQUEUE_{name}": value})
    assert caught.value.message.startswith(f"OMNIQUEUE_{name}={value!r} is not valid: ")
    assert caught.value.param == f"OMNIQUEUE_{name}"


@pytest.mark.parametrize("url", ["http://user:hunter2@host", "redis://user:hunter2@host:port", "x://:hunter2@h/p@th"])
def test_a_bad_url_is_shown_without_its_password(url: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        settings.load({"OMNIQUEUE_REDIS_URL": url})
    assert "hunter2" not in caught.value.message
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("redis_url", "broker_url", "celerys"),
    [
        ("redis://h:1/2", None, "redis://h:1/2"),
        ("redis://h:1/2", "amqp://h", "amqp://h"),
        ("unix:///run/v.sock", None, "redis+socket:///run/v.sock?virtual_host=0"),
        ("unix:///run/v.sock?db=3", None, "redis+socket:///run/v.sock?virtual_host=3"),
        ("unix://u:p@/run/v.sock?db=3", None, "redis+socket://u:p@/run/v.sock?virtual_host=3"),
        ("unix:///run/v.sock", "amqp://h", "amqp://h"),
    ],
)
def test_celery_gets_the_broker_in_its_own_spelling(redis_url: str, broker_url: str | None, celerys: str) -> None:
    assert settings.Settings(redis_url=redis_url, broker_url=broker_url).celery_broker() == celerys


def test_the_payload_namespace_tells_deployments_apart_and_holds_no_secret() -> None:
    base = settings.Settings(redis_url="redis://u:p@h:1/2")
    assert base.payload_namespace() == settings.Settings(redis_url="redis://x:y@h:1/2").payload_namespace()
    others = [
        settings.Settings(redis_url="redis://u:p@h:1/3"),
        settings.Settings(redis_url="redis://u:p@h:2/2"),
        settings.Settings(redis_url="redis://u:p@i:1/2"),
        dataclasses.replace(base, namespace="other"),
        settings.Settings(redis_url="unix:///a?db=1"),
        settings.Settings(redis_url="unix:///a?db=2"),
    ]
    names = {one.payload_namespace() for one in (base, *others)}
    assert len(names) == 1 + len(others)
    assert all(len(name) == 8 and set(name) <= set("0123456789abcdef") for name in names)
