"""What the documents show still works: links lead somewhere, specs are accepted, commands and targets exist."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from rubato.cli.app import app
from rubato.spec import parse_spec

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("cluster_configs/*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_local_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_spec_of_the_readme_is_accepted() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert parse_spec(yaml.safe_load(text)).sizes == [4, 8, 12, 16]


def test_the_spec_sent_with_curl_is_accepted() -> None:
    (text,) = re.findall(r"-d '(\{\s*\"name\".*?)'\n", README, re.DOTALL)
    assert parse_spec(json.loads(text)).name == "by-curl"


def test_commands_and_targets_of_the_readme_exist() -> None:
    commands = set(re.findall(r"^rubato (\w+)", README, re.MULTILINE))
    known = set(get_command(app).commands)
    assert {"up", "submit", "scale", "down"} <= commands <= known
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= set(re.findall(r"\bmake ([a-z]+)", README)) <= targets


SAYINGS = (
    r'\.event\(\s*"([a-z_.]+)"',
    r'"kind": "([a-z_.]+)"',
    r'events\.add\([^)]*?"([a-z_]+\.[a-z_]+)"',
    r'tell\(\s*"([a-z_.]+)"',
    r'\bkind(?:, message)? = "([a-z_]+\.[a-z_]+)"',
)
"""How code says what kind an event is of."""


def test_every_kind_of_event_is_in_the_reference() -> None:
    sources = [path.read_text() for root in ("workers", "service") for path in sorted((ROOT / root).rglob("*.py"))]
    said = {kind for text in sources for saying in SAYINGS for kind in re.findall(saying, text, re.DOTALL)}
    assert {"worker.lost", "checkpoint.saved", "job.queued", "spike.rolled_back", "gradients.vanishing"} <= said
    described = set(re.findall(r"`([a-z_.]+)`", (ROOT / "docs" / "reference.md").read_text()))
    assert said <= described
