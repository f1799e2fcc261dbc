"""The course as data: what a page needs, how long it takes, and what is drawn from that."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import course
import exercise_pages
import gallery
import landing
import notebooks
import pytest

PAGES = course.in_order()
each_page = pytest.mark.parametrize("page", PAGES)

#: How prose names a page, and the pages that may be meant: the layer, or its kernel. Longer names
#: come first, since they hold shorter ones.
NAMES = {
    r"memory of a training step|updates in backward": ["7_optimizers/4_in_backward"],
    r"attention for the online softmax": ["3_attention/1_attention"],
    r"flash attention": ["gpu/10_flash_attention"],
    r"padded batches": ["5_caching/4_padded_batches"],
    r"paged caches": ["6_generation/3_continuous_batching"],
    r"kinds of cache": ["5_caching/2_kinds_of_cache"],
    r"the cache|why a cache": ["5_caching/1_why_cache"],
    r"rotary positions|positions as rotations": ["2_qwen2/2_rope"],
    r"GaLore": ["7_optimizers/2_galore"],
    r"swapping (two )?tensors": ["8_quantized_weights/1_swapping_tensors"],
    r"conversions": ["8_quantized_weights/2_conversions"],
    r"quantised weight": ["8_quantized_weights/3_quantized_weight"],
    r"loading": ["8_quantized_weights/4_loading"],
    r"int8 and int4": ["8_quantized_weights/5_int8_int4"],
    r"matrix products?|tiled product": ["gpu/6_matmul"],
    r"AdamW": ["7_optimizers/1_adamw", "gpu/5_adamw"],
    r"RMSNorm": ["2_qwen2/1_rms_norm", "gpu/3_rms_norm"],
    r"SwiGLU": ["2_qwen2/3_swiglu", "gpu/1_swiglu"],
    r"softmax": ["gpu/2_softmax"],
    r"masks|what a query may see": ["3_attention/2_masks"],
    r"attention": ["3_attention/1_attention"],
    r"sampling": ["1_gpt2/4_sampling"],
    r"training": ["1_gpt2/3_training"],
    r"tokens": ["1_gpt2/1_tokens"],
    r"GPT-2|the model": ["1_gpt2/2_gpt2"],
    r"Qwen2": ["2_qwen2/4_qwen2"],
}
COUNTS = {"two": 2, "three": 3, "four": 4}


def before_you_start(page: str) -> str:
    """The section's sentences that say what to read, in one line."""
    text = exercise_pages.script(page).read_text(encoding="utf-8").replace("\n# ", "\n")
    section = re.search(
        r'^Before you start\n-+\n+(.*?)(?:\n"""|^[^\n]+\n-{3,}\n)', text, re.M | re.S
    )
    assert section, f"{page} has no section Before you start"
    sentences = re.split(r"(?<=\.)\s+", " ".join(section[1].split()))
    said = [s for s in sentences if re.search(r"^Read the |\bthe page on\b", s)]
    # What comes before is no page: "You need matrix products, the softmax, and the page on tokens".
    return " ".join(re.sub(r"^You need .*?(?=the page on)", "", sentence) for sentence in said)


def named(page: str, said: str) -> list[list[str]]:
    """What a text names, in any order: for each name the pages that may be meant."""
    here = PAGES.index(page)
    chapter = [name for name in PAGES if name.split("/")[0] == page.split("/")[0]]
    found = []
    if re.search(r"page before this one|previous page|one before this", said):
        found.append([PAGES[here - 1]])
    if several := re.search(r"the (\w+) pages before this one", said):
        found += [[name] for name in PAGES[here - COUNTS[several[1]] : here]]
    if several := re.search(r"the first (\w+) pages of this chapter", said):
        found += [[name] for name in chapter[: COUNTS[several[1]]]]
    # "the page on GPT-2, for attention, and ...": what a page is good for is no page.
    said = re.sub(r"in the chapter on \w+|, for \w+,", "", said).partition(":")[0]
    for pattern, meant in NAMES.items():
        if re.search(pattern, said):
            found.append([name for name in meant if name in PAGES[:here]])
            said = re.sub(pattern, "", said)
    return found


def disagreements(page: str, said: str, needs: list[str]) -> list[str]:
    """Where the prose and the data differ, in either direction."""
    names = named(page, said)
    problems = [f"{page} names {' or '.join(m)}, NEEDS does not" for m in names
                if not set(m) & set(needs)]  # fmt: skip
    mentioned = {name for meant in names for name in meant}
    return problems + [f"{page} needs {n}, its prose does not say so"
                       for n in needs if n not in mentioned]  # fmt: skip


# -- what builds on what ---------------------------------------------------------------------


def test_every_page_is_in_the_course() -> None:
    assert list(course.NEEDS) == PAGES


@each_page
def test_what_a_page_needs_comes_before_it(page: str) -> None:
    """In reading order, so that there is no circle either."""
    needs = course.NEEDS[page]
    assert set(needs) <= set(PAGES[: PAGES.index(page)])
    assert needs == sorted(set(needs), key=PAGES.index)


@each_page
def test_prose_and_data_agree(page: str) -> None:
    assert disagreements(page, before_you_start(page), course.NEEDS[page]) == []


def test_a_disagreement_is_found() -> None:
    page, said = "2_qwen2/2_rope", "Read the page on GPT-2, for attention, and the one on RMSNorm."
    needs = ["1_gpt2/2_gpt2", "2_qwen2/1_rms_norm"]
    assert disagreements(page, said, needs) == []
    assert len(disagreements(page, said.replace("GPT-2", "sampling"), needs)) == 2
    assert len(disagreements(page, said, needs[:1])) == 1
    assert len(disagreements("1_gpt2/5_attention_maps", "Read the previous page.", [])) == 1


def test_no_page_says_its_minutes() -> None:
    """The strip below the title says them; a second number would go out of date."""
    minutes = re.compile(r"\b(minutes?|half an hour)\b")
    for page in PAGES:
        text = exercise_pages.script(page).read_text(encoding="utf-8")
        start = text.index("Before you start")
        assert not minutes.search(text[start : start + 700]), page
    for header in gallery.TUTORIALS.glob("*/*.rst"):
        assert not minutes.search(header.read_text(encoding="utf-8")), header


def test_arcs_lead_to_what_no_other_page_brings() -> None:
    """Fewer arcs, and still everything that comes before."""
    for page in PAGES:
        direct = course.direct(page)
        reached = set(direct).union(*(course.behind(name) for name in direct))
        assert reached == course.behind(page)
        assert not any(a in course.behind(b) for a in direct for b in direct)


def test_graph_and_table_have_every_page() -> None:
    graph, table = course.graph(), course.table()
    ET.fromstring(graph)
    for page in PAGES:
        address = exercise_pages.document(page)
        assert graph.count(f'href="{address[1:]}.html"') == 1
        assert f"     - {course.minutes(page)}" in table
        assert table.count(f"   * - :doc:`{address}`") == 1
    assert graph.count("marker-end") == sum(len(course.direct(page)) for page in PAGES)


# -- minutes, packages, exercises ------------------------------------------------------------


def test_minutes_follow_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "word " * 2000 + "\n\n.. math::\n\n   a = b\n\n.. math::\n\n   c\n\nhttps://a.org/b/c\n"
    code = "# a comment\n\n" + "x = 1\n" * 80
    blocks = [SimpleNamespace(type=t, content=c) for t, c in (("text", text), ("code", code))]
    monkeypatch.setattr(notebooks, "blocks", lambda script: blocks)
    course.minutes.cache_clear()
    try:
        assert course.minutes("1_gpt2/1_tokens") == 15  # 10 and 4 and 1
    finally:
        course.minutes.cache_clear()


@each_page
def test_every_page_has_its_facts(page: str) -> None:
    assert course.minutes(page) < 90
    assert course.seconds(page) in course.STEPS, "make docs, then docs/course.py with its report"
    assert course.own_exercises(page) >= 1
    assert (course.packages(page) == ["triton"]) == page.startswith("gpu/")


def test_packages_are_those_beyond_the_core() -> None:
    assert course.packages("1_gpt2/1_tokens") == []
    assert course.packages("1_gpt2/2_gpt2") == ["transformers"]
    assert {"torch", "numpy", "matplotlib", "tokenizers", "lm_from_scratch"} <= course.core()


# -- seconds ---------------------------------------------------------------------------------


def report(folder: Path, seconds: dict[str, float]) -> Path:
    suite = ET.Element("testsuite")
    for page, time in seconds.items():
        ET.SubElement(suite, "testcase", file=f"../tutorials/{page}.py", time=str(time))
    ET.ElementTree(suite).write(folder / "report.xml")
    return folder / "report.xml"


def test_stored_seconds_stay_while_they_are_fair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course, "RUN_SECONDS", tmp_path / "seconds.json")
    a, b, c = PAGES[:3]
    assert course.store(report(tmp_path, {a: 11.0, b: 3.0})) == {a: 10, b: 5}
    before = course.RUN_SECONDS.read_bytes()
    course.store(report(tmp_path, {a: 14.0, b: 4.0}))
    assert course.RUN_SECONDS.read_bytes() == before
    assert course.store(report(tmp_path, {a: 44.0, c: 70.0})) == {a: 45, b: 5, c: 60}


def test_wrong_and_missing_seconds_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course, "RUN_SECONDS", tmp_path / "seconds.json")
    a, b, c, *others = PAGES[:8]
    usual = {a: 30.0, b: 60.0, **dict.fromkeys(others, 20.0)}
    course.store(report(tmp_path, usual))
    assert course.check_seconds(report(tmp_path, usual | {a: 99.0, b: 11.0})) == []
    problems = course.check_seconds(report(tmp_path, usual | {a: 101.0, b: 9.0, c: 1.0}))
    assert [problem.split()[0] for problem in problems] == [f"{c}:", a, b]
    # On a busy machine every page takes longer.
    busy = {page: 5 * time for page, time in usual.items()}
    assert course.check_seconds(report(tmp_path, busy)) == []
    problems = course.check_seconds(report(tmp_path, busy | {a: 5 * 101.0}))
    assert [problem.split()[0] for problem in problems] == [a]
    assert course.check_seconds(report(tmp_path, {a: 30.0})) == [
        f"{page}: in seconds.json, but it did not run" for page in (b, *others)
    ]


def test_durations_in_words() -> None:
    assert course.duration(45) == "45 seconds"
    assert course.duration(60) == "1 minute"
    assert course.duration(90) == "1.5 minutes"


# -- the landing page ------------------------------------------------------------------------


def test_the_result_is_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same each time, and a distribution in each row; the words say what is drawn."""
    result = landing.compute()
    assert result == landing.compute()
    assert len(result.steps) == len(result.weights) == landing.STEPS
    for i, (step, row) in enumerate(zip(result.steps, result.weights, strict=True)):
        probabilities = [probability for _, probability in step]
        assert probabilities == sorted(probabilities, reverse=True) and sum(probabilities) <= 1
        assert step[0][0] == result.tokens[i - landing.STEPS]
        assert len(row) == len(result.tokens) - landing.STEPS + i
        assert sum(row) == pytest.approx(1, abs=1e-5)
    figure = ET.fromstring(landing.figure(result))
    assert figure.get("role") == "img"
    label = figure.get("aria-label") or ""
    assert landing.PROMPT in label
    for step in result.steps:
        for token, probability in step:
            assert f"{landing.spoken(token)} ({probability:.0%})" in label
    cells = [rect for rect in figure.iter("rect") if rect.get("class") == "cell"]
    assert len(cells) == sum(map(len, result.weights))


def test_a_line_end_has_a_name() -> None:
    assert landing.shown("\n") == "↵" and landing.spoken("\n") == "a line end"
    assert landing.shown(" file") == "file" and landing.shown("  ") == "␣"


# -- the strip -------------------------------------------------------------------------------


def test_a_page_is_read_again_when_its_strip_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source is the same, so nothing else tells Sphinx."""
    documents = {exercise_pages.document(page)[1:] for page in PAGES}
    env = SimpleNamespace(found_docs={*documents, "index"})
    assert course.outdated(None, env, set(), set(), set()) == documents
    assert course.outdated(None, env, set(), set(), set()) == set()
    monkeypatch.setitem(course.NEEDS, "1_gpt2/4_sampling", PAGES[:2])
    changed = course.outdated(None, env, set(), set(), set())
    assert changed == {"auto_tutorials/1_gpt2/4_sampling"}


def test_only_pages_of_the_course_have_a_strip() -> None:
    assert course.page_of("auto_tutorials/1_gpt2/1_tokens") == "1_gpt2/1_tokens"
    assert course.page_of("gpu/1_swiglu") == "gpu/1_swiglu"
    assert course.page_of("index") is None
    assert course.page_of("auto_tutorials/index") is None


def test_a_new_page_is_drawn_before_it_is_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preview of a page without its entry, stored seconds or notebook is no error."""
    for page in ("1_gpt2/4_sampling", "gpu/12_flash_backward"):
        monkeypatch.delitem(course.NEEDS, page)
    monkeypatch.setattr(course, "executed", lambda page: {})
    monkeypatch.setattr(course, "stored_seconds", dict)
    assert course.facts("gpu/12_flash_backward")[1] == ["needs triton"]
    assert course.facts("1_gpt2/4_sampling")[1] == ["needs transformers"]
    assert course.graph() and course.table() and course.totals().startswith(str(len(PAGES)))
