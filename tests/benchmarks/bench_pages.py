"""How long the site's pages take to build, beside what is allowed: from the last ``make docs``.

Nothing is measured here: the gallery writes the seconds of every page that it ran. A build that ran
some pages only is not counted, and without a build there are no rows.
"""

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import measure
from measure import Row, Size

BUILT = measure.ROOT / "docs" / "_build"
PAGE, SITE = 25.0, 2 * 5 * 60.0  # five minutes on two cores


def rows(size: Size, built: Path = BUILT) -> Iterator[Row]:
    report = built / "gallery_junit.xml"
    if not report.is_file():
        return
    cases = {case.get("file", ""): float(case.get("time", 0)) for case in cases_of(report)}
    took = {name: seconds for name, seconds in cases.items() if seconds > 0}
    if len(took) < len(cases):
        return
    yield budget("the scripts of all pages", sum(took.values()), SITE)
    for name, seconds in sorted(took.items(), key=lambda pair: -pair[1]):
        yield budget("/".join(Path(name).with_suffix("").parts[-2:]), seconds, PAGE)


def cases_of(report: Path) -> list[ET.Element]:
    return list(ET.parse(report).getroot().iter("testcase"))


def budget(setting: str, seconds: float, allowed: float) -> Row:
    return measure.compare(setting, "ours", measure.BUDGET, "s", [seconds], [allowed], target=1.0)
