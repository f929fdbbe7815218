"""The manifests for Kubernetes: against its schemas, and against what the code and the compose file say."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from omniqueue import catalog, settings

ROOT = Path(__file__).resolve().parents[2]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "kubernetes" / name).read_text()))


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = [d for d in documents("omniqueue.yaml") if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return found


def container(name: str) -> dict[str, Any]:
    (found,) = named("Deployment", name)["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize("document", documents("omniqueue.yaml"), ids=lambda d: f"{d['kind']}-{d['metadata']['name']}")
def test_it_is_what_kubernetes_takes(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, "1.31", strict=True)


def test_the_check_can_fail() -> None:
    broken = copy.deepcopy(named("Deployment", "stage1"))
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.31", strict=True)


def test_stages_and_router_share_memory_media_node_and_name_of_the_host() -> None:
    facts = named("ConfigMap", "omniqueue")["data"]
    assert facts["OMNIQUEUE_HOST"]
    for name in ("router", "stage0", "stage1"):
        pod = named("Deployment", name)["spec"]["template"]["spec"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container(name)["volumeMounts"]}
        assert mounts == {"shm": "/dev/shm", "media": "/var/lib/omniqueue/media"}
        assert pod["volumes"] == named("Deployment", "router")["spec"]["template"]["spec"]["volumes"]
        assert pod["nodeSelector"] == {"omniqueue": "stages"}
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container(name)["envFrom"] == [{"configMapRef": {"name": "omniqueue"}}]


def test_commands_and_images_are_those_of_the_compose_file() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for name in ("router", "stage0", "stage1"):
        assert container(name)["command"] == services[name]["command"]
        assert container(name)["image"] == services[name]["image"]
        pod = named("Deployment", name)["spec"]["template"]["spec"]
        assert f"{pod['terminationGracePeriodSeconds']}s" == services[name]["stop_grace_period"]


def test_the_environment_is_one_that_the_program_takes() -> None:
    facts = dict(named("ConfigMap", "omniqueue")["data"])
    config = settings.load(facts)
    assert config.drain_grace_s == float(facts["OMNIQUEUE_DRAIN_GRACE_S"])
    known = {f"OMNIQUEUE_{name.upper()}" for name in settings.Settings.__dataclass_fields__}
    told = set(facts) | {e["name"] for n in ("router", "stage0") for e in container(n)["env"]} - {"REDIS_PASSWORD"}
    assert told <= known


def test_keda_scales_each_stage_on_its_own_queue() -> None:
    queues = catalog.load(settings.load(dict(named("ConfigMap", "omniqueue")["data"]))).queues()
    scaled = [d for d in documents("keda.yaml") if d["kind"] == "ScaledObject"]
    assert len(scaled) == len(queues)
    for document in scaled:
        target = document["spec"]["scaleTargetRef"]["name"]
        (trigger,) = document["spec"]["triggers"]
        index = trigger["metadata"]["valueLocation"].split(".")[1]
        assert queues[int(index)] == target
        assert target in container(target)["command"]
        assert "replicas" not in named("Deployment", target)["spec"]  # they are KEDA's
        assert trigger["metadata"]["url"] == "http://router.default.svc:8000/v1/queues"
        assert named("Service", "router")["spec"]["ports"] == [{"port": 8000}]
