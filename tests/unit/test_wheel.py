"""What is installed is what was written: a wheel works outside the clone, and has nothing more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from gallery import pages

ROOT = Path(__file__).resolve().parents[2]
BUILD = """
import sys
sys.path.insert(0, "docs/_ext")
import build_backend
getattr(build_backend, sys.argv[1])(sys.argv[2])
"""
USE = """
import contextlib, importlib, io, sys
from pathlib import Path
import lm_from_scratch as package
from lm_from_scratch.__main__ import main

assert package.__file__.startswith(sys.argv[1]), package.__file__
root = Path(package.__file__).parent
files = [p.relative_to(root.parent).with_suffix("") for p in root.rglob("*.py")]
names = [".".join(p.parts).removesuffix(".__init__") for p in files if p.name != "text"]
assert len(names) > 100, names
for name in names:
    if sys.platform == "linux" or ".kernels." not in name:
        importlib.import_module(name)

def said(code, *command):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(list(command)) == code, out.getvalue()
    return out.getvalue()

assert "rms_norm" in said(0, "list")
assert "my-course" in said(0, "notebooks", "my-course")
assert len(list(Path("my-course").rglob("*.ipynb"))) > 200
assert "Write in rms_norm.py" in said(0, "start", "rms_norm")
assert "not written yet" in said(1, "check", "rms_norm")
said(0, "train", "--out", "run", "--steps", "2", "--warmup", "1", "--batch-size", "1")
said(0, "quantize", "run/model", "--out", "int8")
for model in ("gpt2-docs", "qwen2-docs", "tasks", "int8"):
    assert said(0, "generate", "--model", model, "--prompt", "The", "--max-new-tokens", "2")
assert "the package alone" in said(0, "doctor")
"""


def build(source: Path, kind: str, out: Path) -> Path:
    """Build with the setuptools that is here: no network."""
    out.mkdir()
    command = [sys.executable, "-c", BUILD, kind, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that a build reads, and some that it must leave behind."""
    copy = tmp_path_factory.mktemp("wheel") / "with a space, ü"
    copy.mkdir()
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, copy / name)
    for name in ("lm_from_scratch", "tests", "tutorials", "docs/_ext"):
        skip = shutil.ignore_patterns("__pycache__", "site", "notebooks")
        shutil.copytree(ROOT / name, copy / name, ignore=skip, copy_function=shutil.copyfile)
    return copy


@pytest.fixture(scope="module")
def sdist(source: Path) -> Path:
    return build(source, "build_sdist", source.parent / "sdist")


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    return build(source, "build_wheel", source.parent / "wheel")


def test_a_wheel_holds_the_package_and_the_notebooks(source: Path, wheel: Path) -> None:
    package = source / "lm_from_scratch"
    expected = {p.relative_to(source).as_posix() for p in package.rglob("*") if p.is_file()}
    written = [(p.parent.name, p.stem) for p in [*pages.scripts(), *pages.notebooks()]]
    expected |= {f"lm_from_scratch/notebooks/{chapter}/{page}.ipynb" for chapter, page in written}
    held = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert held == expected
    assert "lm_from_scratch/py.typed" in held


@pytest.mark.slow
def test_an_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
        assert not [name for name in names if "/tests" in name or "/tutorials/" in name]
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert contents(build(unpacked, "build_wheel", tmp_path / "wheel")) == contents(wheel)


@pytest.mark.slow
def test_a_wheel_works_outside_the_clone(wheel: Path, tmp_path: Path) -> None:
    """A wheel of Python alone is installed by unpacking it; no file of the clone is in reach."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", USE, str(site)],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
