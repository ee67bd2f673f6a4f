"""The compose file: complete services, pinned images, and nothing published beyond this machine."""

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def test_the_services_are_the_parts_of_a_rubato() -> None:
    assert set(SERVICES) == {"head", "worker", "control-plane", "postgres"}
    assert [name for name, service in SERVICES.items() if "profiles" in service] == ["postgres"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_a_pinned_image_and_a_health_check(name: str) -> None:
    service = SERVICES[name]
    image, _, tag = service["image"].partition(":")
    assert image
    assert tag not in ("", "latest")
    assert service["healthcheck"]["test"]
    if "build" in service:
        context = (ROOT / "deploy" / service["build"]["context"]).resolve()
        assert context == ROOT
        dockerfile = (context / service["build"]["dockerfile"]).read_text()
        assert f" AS {service['build']['target']}\n" in dockerfile


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_waits_for_and_mounts_is_defined(name: str) -> None:
    service = SERVICES[name]
    assert set(service.get("depends_on", {})) <= set(SERVICES)
    assert {volume.split(":")[0] for volume in service["volumes"]} <= set(COMPOSE["volumes"])


def test_ports_are_published_to_this_machine_alone() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_drivers_workers_and_control_plane_share_the_run_directories() -> None:
    mounts = {"head", "worker", "control-plane"}
    assert all("runs:/var/lib/rubato/runs" in SERVICES[name]["volumes"] for name in mounts)
