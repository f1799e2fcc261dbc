"""One set of requirements in three files: pyproject.toml, environment.yml, constraints.txt."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
#: An extra may ask for another one.
REQUIREMENTS = [
    *PROJECT["dependencies"],
    *(line for line in EXTRAS if not line.startswith(f"{PROJECT['name']}[")),
]


def conda_environment() -> tuple[list[str], list[str]]:
    """What conda installs, and what pip installs inside it."""
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = [entry for entry in listed if isinstance(entry, str)]
    (pip,) = [entry["pip"] for entry in listed if isinstance(entry, dict)]
    return conda, pip


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in found.items()}


def test_conda_users_get_the_same_requirements() -> None:
    _, pip = conda_environment()
    assert [line for line in pip if not line.startswith("--")] == REQUIREMENTS


def test_conda_users_get_the_same_pins_and_the_package() -> None:
    conda, pip = conda_environment()
    assert [line for line in pip if line.startswith("--")] == [
        "--constraint constraints.txt",
        "--editable .",
    ]
    assert f"python{PROJECT['requires-python']}" in conda


def test_names_are_required_once() -> None:
    names = [canonicalize_name(Requirement(line).name) for line in REQUIREMENTS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("line", REQUIREMENTS)
def test_requirement_has_a_pin_inside_its_range(line: str) -> None:
    requirement = Requirement(line)
    pin = pins()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(Version(pin))


def test_constraints_are_plain_pins() -> None:
    """No address, no path, no local version: each line means the same on every machine."""
    for name, version in pins().items():
        assert name.replace("-", "").replace(".", "").isalnum()
        assert str(Version(version)) == version
        assert Version(version).local is None


def test_every_pin_runs_on_the_oldest_python() -> None:
    """Debian 12 has 3.11.2; pins that are not installed here are not seen."""
    oldest = Version(PROJECT["requires-python"].removeprefix(">=") + ".0")
    for name, pin in pins().items():
        try:
            installed = metadata(name)
        except PackageNotFoundError:
            continue
        if installed["Version"] == pin:
            assert oldest in SpecifierSet(installed["Requires-Python"] or ""), f"{name}=={pin}"


def test_the_project_stays_open() -> None:
    """The learner's package keeps ranges; exact pins belong to constraints.txt."""
    for line in PROJECT["dependencies"]:
        assert "==" not in line
        assert "<" not in line
