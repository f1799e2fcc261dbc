"""Every recorded proof: passes at once where its record is current, else is repeated.

``RECORDS=again`` repeats all of them and compares (make test-all); ``RECORDS=stale`` names those
alone whose records are not current (make records). Under ``CI=true`` nothing is written: a record
that is not current fails, and a few that the commit draws are proved again.
"""

import os
import subprocess

import pytest
from proofs import ROOT, proofs, records
from records import Proof

MODE, CI = os.environ.get("RECORDS", ""), os.environ.get("CI", "").lower() == "true"
HELD = records(again=MODE == "again", write=not CI)


def commit() -> str:
    """The commit that is checked, or nothing outside of a clone."""
    command = ["git", "rev-parse", "HEAD"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else ""


def chosen() -> list[Proof]:
    """Longest first, so that two processes end together."""
    found = [p for p in proofs() if MODE != "stale" or HELD.state(p) != "current"]
    return sorted(found, key=HELD.seconds, reverse=True)


def drawn() -> list[Proof]:
    return HELD.chosen(proofs(), commit()) if CI and MODE != "again" else []


def hold(proof: Proof, again: bool) -> None:
    state = HELD.state(proof)
    if (again or state != "current") and (lacks := proof.lacks()):
        pytest.skip(f"its record is {state}, and cannot be repeated here: {lacks}")
    fault = ""
    try:
        records(again, HELD.write).hold(proof)
    except AssertionError as error:
        fault = str(error)
    if fault:
        pytest.fail(fault, pytrace=False)


@pytest.mark.parametrize("proof", chosen(), ids=str)
def test_record(proof: Proof) -> None:
    hold(proof, HELD.again)


@pytest.mark.parametrize("proof", drawn(), ids=str)
def test_the_commit_draws(proof: Proof) -> None:
    hold(proof, again=True)


def test_no_record_is_without_its_subject() -> None:
    """Remove its file from tests/slow/recorded."""
    assert HELD.orphans(proofs()) == []
