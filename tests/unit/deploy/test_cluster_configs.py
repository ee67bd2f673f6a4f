"""The cluster configurations: accepted by Ray's own validator, and in step with the pinned versions."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from rubato import __version__

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "cluster_configs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RAY = next(match[1] for line in PROJECT["dependencies"] if (match := re.fullmatch(r"ray\[.*\]==(.+)", line)))


def ssh_hosts() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((CONFIGS / "ssh-hosts.yaml").read_text())
    return config


def test_ray_accepts_the_ssh_hosts() -> None:
    prepared = prepare_config(ssh_hosts())
    validate_config(prepared)
    (node_type,) = prepared["available_node_types"].values()
    assert prepared["max_workers"] == node_type["max_workers"] == len(ssh_hosts()["provider"]["worker_ips"])


def test_ray_refuses_a_misspelt_field_in_the_ssh_hosts() -> None:
    with pytest.raises(Exception, match="rsync_excludes"):
        validate_config(prepare_config(ssh_hosts() | {"rsync_excludes": []}))


def test_ssh_hosts_install_from_the_lock_and_start_the_ray_they_installed() -> None:
    config = ssh_hosts()
    assert config["setup_commands"] == ["make -C ~/rubato install"]
    starts = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    assert all("~/rubato/.venv/bin/ray" in command for command in starts)


def ray_cluster() -> dict[str, Any]:
    documents = list(yaml.safe_load_all((CONFIGS / "kuberay" / "raycluster.yaml").read_text()))
    assert [document["kind"] for document in documents] == ["PersistentVolumeClaim", "RayCluster"]
    cluster: dict[str, Any] = documents[1]
    return cluster


def groups() -> Iterator[tuple[str, dict[str, Any]]]:
    spec = ray_cluster()["spec"]
    yield "head", spec["headGroupSpec"]
    for group in spec["workerGroupSpecs"]:
        yield group["groupName"], group


def test_the_ray_cluster_is_of_the_pinned_ray() -> None:
    cluster = ray_cluster()
    assert cluster["apiVersion"] == "ray.io/v1"
    assert cluster["spec"]["rayVersion"] == RAY


@pytest.mark.parametrize(("name", "group"), list(groups()))
def test_a_group_of_the_ray_cluster_is_whole(name: str, group: dict[str, Any]) -> None:
    assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == ("ray-head" if name == "head" else "ray-worker")
    assert container["image"] == f"rubato-worker:{__version__}-ray{RAY}"
    for amounts in ("requests", "limits"):
        assert {"cpu", "memory"} <= set(container["resources"][amounts])
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert pod["securityContext"]["runAsNonRoot"] is True
    if name != "head":
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_the_head_trains_nothing() -> None:
    assert ray_cluster()["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_the_compose_file_uses_the_same_images() -> None:
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    assert services["head"]["image"] == services["worker"]["image"] == f"rubato-worker:{__version__}-ray{RAY}"
    assert services["control-plane"]["image"] == f"rubato-control-plane:{__version__}"
