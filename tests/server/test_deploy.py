"""The files below ``deploy/`` agree with the command that they start, and with each other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from octavo.runtime.config import EngineConfig
from octavo.runtime.options import option_fields
from octavo.runtime.server.config import ServerConfig

PROJECT = Path(__file__).parents[2]
DEPLOY = PROJECT / "deploy"
OPTIONS = {
    f"--{field.name.replace('_', '-')}" for kind in (EngineConfig, ServerConfig) for field in option_fields(kind)
}
DRAIN_SECONDS = ServerConfig().drain_seconds


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def unit() -> dict[str, str]:
    """Settings of the systemd unit."""
    lines = (DEPLOY / "octavo.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def entrypoint() -> list[str]:
    text = (DEPLOY / "Dockerfile").read_text()
    found = re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    assert found is not None
    command: list[str] = json.loads(found[1])
    return command


def test_commands_exist() -> None:
    """Every option that a file gives is one of ``octavo serve``."""
    (compose,) = documents("compose.yaml")
    (container,) = documents("kubernetes.yaml")[0]["spec"]["template"]["spec"]["containers"]
    commands = [entrypoint()[2:], unit()["ExecStart"].split()[2:], container["args"]]
    commands += [service["command"] for service in compose["services"].values()]
    assert len(commands) == 5
    for command in commands:
        given = {word.split("=")[0] for word in command if word.startswith("--")}
        assert given and given <= OPTIONS, given - OPTIONS
    assert entrypoint()[:2] == ["/opt/octavo/bin/octavo", "serve"] == unit()["ExecStart"].split()[:2]


def test_ranks_and_keys_of_compose() -> None:
    """It says on how many GPUs, and who must be able to read the keys."""
    (compose,) = documents("compose.yaml")
    command = compose["services"]["cuda"]["command"]
    assert command[command.index("--ranks") + 1] == "${OCTAVO_RANKS:-1}"
    (user,) = re.findall(r"useradd --uid (\d+)", (DEPLOY / "Dockerfile").read_text())
    assert f"chown {user} keys" in (DEPLOY / "compose.yaml").read_text()


def test_time_to_drain() -> None:
    """Whoever stops the server waits longer than it lets requests in work go on."""
    (compose,) = documents("compose.yaml")
    for service in compose["services"].values():
        assert int(service["stop_grace_period"].removesuffix("s")) > DRAIN_SECONDS
    assert int(unit()["TimeoutStopSec"]) > DRAIN_SECONDS
    assert documents("kubernetes.yaml")[0]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > DRAIN_SECONDS


def test_probes() -> None:
    """All ask /health, which is 503 during a start: only the startup probe may wait for that."""
    deployment, service = documents("kubernetes.yaml")
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    (port,) = container["ports"]
    assert {(probe["httpGet"]["path"], probe["httpGet"]["port"]) for probe in probes.values()} == {
        ("/health", port["name"])
    }
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 1800
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}
    assert deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"] == service["spec"]["selector"]


def test_the_image_holds_what_it_installs() -> None:
    """What is copied exists, and is all that the build sees."""
    copied = re.findall(r"^COPY (?!--)(.*) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    assert all((PROJECT / source).exists() for source in sources)
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*" and {line[1:] for line in ignored if line.startswith("!")} == sources


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """Its own checker, with a command that exists here."""
    file = tmp_path / "octavo.service"
    file.write_text((DEPLOY / "octavo.service").read_text().replace("/opt/octavo/bin/octavo", "/bin/true"))
    checked = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True)
    assert checked.returncode == 0 and not checked.stderr, checked.stderr
