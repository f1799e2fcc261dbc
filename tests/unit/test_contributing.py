"""Workflow files, hooks and forms say what make.py and the tree say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MAKE = runpy.run_path(str(ROOT / "make.py"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[0-9]*.yml"))


def workflow_problems(text: str) -> list[str]:
    """What a workflow may not do: run anything but a task, take an action by a name that can
    change, or have more rights than it needs."""
    workflow = yaml.safe_load(text)
    found = []
    if workflow.get("permissions") != {"contents": "read"}:
        found.append("the workflow may do more than read")
    for name, job in workflow["jobs"].items():
        if job.get("permissions") not in (None, {"pages": "write", "id-token": "write"}):
            found.append(f"{name} has more rights than publishing needs")
        for step in job["steps"]:
            if "run" in step:
                for line in step["run"].strip().splitlines():
                    called = re.fullmatch(r"make ([a-z-]+)( [A-Z]+=\S+)*", line.strip())
                    if called is None or called[1] not in MAKE["TASKS"]:
                        found.append(f"{name} runs {line!r}, which is no task of make.py")
    for action in re.findall(r"uses: *(.*)", text):
        if not re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action):
            found.append(f"{action} is not pinned to a commit, with its version beside it")
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow(path: Path) -> None:
    assert workflow_problems(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("run: make test", "run: make tests", "'make tests PYTHON=python', which is no task"),
        ("run: make test", "run: pip install . && make test", "no task"),
        ("@11bd71901bbe5b1630ceea73d27597364c9af683 # v4.2.2", "@v4", "is not pinned"),
        ("contents: read", "contents: write", "more than read"),
        ("    timeout-minutes", "    permissions: write-all\n    timeout-minutes", "more rights"),
    ],
)
def test_a_planted_fault_is_found(before: str, after: str, fault: str) -> None:
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    assert before in text
    assert any(fault in found for found in workflow_problems(text.replace(before, after)))


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "CHANGELOG.md", "README.md"])
def test_what_a_text_names_is_there(name: str) -> None:
    """Links to files, and tasks."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (ROOT / link).exists(), f"{name} links to {link}"
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert target in {*MAKE["TASKS"], "help"}, f"{name} names make {target}"


def test_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.M | re.S
    )
    assert blocks
    for block in blocks:
        exec(block, {})
        assert capsys.readouterr().out.startswith(" ")


def test_the_hooks_are_those_of_make_lint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tools from the same environment; a hook gets the files, `make lint` a dot."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (local,) = config["repos"]
    hooks = [hook["entry"].replace(" --force-exclude", "") for hook in local["hooks"]]
    commands: list[str] = []
    monkeypatch.setenv("PY", ".venv/bin/python")
    lint = MAKE["lint"]
    monkeypatch.setitem(lint.__globals__, "run", lambda *words: commands.append(" ".join(words)))
    lint()
    assert hooks == [line.removesuffix(" .").replace(" --check", "") for line in commands]
