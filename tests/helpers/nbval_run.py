"""A stored notebook executed by nbval, which compares every text with what is stored."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def run_nbval(path: Path, folder: Path, environment: dict[str, str]) -> tuple[int, str, dict]:
    """The status, the end of the log, and the counts of the report."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(folder)]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "--nbval", "--nbval-current-env"]
    command += ["--nbval-cell-timeout", "600", f"--junitxml={report}", "-q", str(path)]
    hidden = ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER")
    env = {name: value for name, value in environment.items() if name not in hidden}
    run = subprocess.run(command, env=env, capture_output=True, text=True, cwd=folder)
    log = run.stdout[-6000:] + run.stderr[-2000:]
    assert report.is_file(), f"nbval ended with {run.returncode} and without a report:\n{log}"
    suite = next(ET.parse(report).getroot().iter("testsuite"))
    return run.returncode, log, dict(suite.attrib)
