"""Each check of built pages finds the fault it is for."""

from __future__ import annotations

from pathlib import Path

import page_checks
import pytest

GOOD = """<!doctype html><html lang="en"><head><link rel="stylesheet" href="_static/site.css?v=1">
</head><body><h1 id="top">Page</h1><a href="#top">up</a> <a href="other.html#place">other</a>
<a href="https://example.org/">outside</a><img src="_static/a.png" alt="a"></body></html>"""
OTHER = '<html lang="en"><body><p id="place">x</p><a href="index.html">back</a></body></html>'


@pytest.fixture
def small_site(tmp_path: Path) -> Path:
    site = tmp_path / "site"
    (site / "_static").mkdir(parents=True)
    (site / "_static" / "site.css").write_text("")
    (site / "_static" / "a.png").write_text("")
    (site / "index.html").write_text(GOOD)
    (site / "other.html").write_text(OTHER)
    return site


def problems(site: Path) -> list[str]:
    pages = page_checks.read(site)
    return [
        *page_checks.check_links(site, pages),
        *page_checks.check_ids(pages),
        *page_checks.check_no_outside_resources(pages),
        *page_checks.check_images(pages),
        *page_checks.check_paths(site, Path("/home/me/lm")),
    ]


def test_a_sound_site_has_no_problems(small_site: Path) -> None:
    assert problems(small_site) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("other.html#place", "missing.html", "does not exist"),
        ("other.html#place", "other.html#nowhere", "no such place"),
        ("#top", "#nowhere", "no such place"),
        ("other.html#place", "../outside.html", "leaves the site"),
        ("_static/a.png", "_static/b.png", "does not exist"),
        ("_static/site.css?v=1", "https://cdn.example.org/site.css", "loads https"),
        ("_static/a.png", "//cdn.example.org/a.png", "loads //"),
        ("<h1 id", "<h2 id='top'>x</h2><h1 id", "more than once"),
        (' alt="a"', "", "no alt text"),
        ('_static/a.png" alt="a', '_static/sphx_glr_1_page_001.png" alt="1 page', "has no title"),
        ("Page", '<svg role="img" aria-label=""></svg>', "has no title"),
        ("Page", "PosixPath('/elsewhere')", "shows PosixPath("),
        ("Page", "/home/me/lm/README.md", "shows /home/me/lm"),
        ('alt="a"', 'alt="_images/0123abcd.png"', "has no title"),
    ],
)
def test_a_planted_fault_is_found(small_site: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    (small_site / "index.html").write_text(GOOD.replace(old, new, 1))
    found = problems(small_site)
    assert any(message in problem for problem in found), found


CASE = '<testcase classname="1_page" time="{time}">{inner}</testcase>'


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("", "did not run"),
        (CASE.format(time="0.0", inner=""), "took no time"),
        (CASE.format(time="2.0", inner="<failure/>"), "did not pass"),
        (CASE.format(time="2.0", inner="<skipped/>"), "did not pass"),
        (CASE.format(time="2.0", inner="").replace("1_page", "2_page"), "is no script"),
    ],
)
def test_a_tutorial_that_did_not_run_is_found(tmp_path: Path, case: str, message: str) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(f"<testsuite>{case}</testsuite>")
    found = page_checks.check_junit(report, [Path("1_page.py")])
    assert any(message in problem for problem in found), found


def test_a_tutorial_that_ran_is_accepted(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(f"<testsuite>{CASE.format(time='2.0', inner='')}</testsuite>")
    assert page_checks.check_junit(report, [Path("1_page.py")]) == []
