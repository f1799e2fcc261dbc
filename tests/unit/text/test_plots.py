"""The same stories on every machine, as many as are wanted, and both languages on one side."""

import hashlib
from random import Random

import pytest

from lm_from_scratch.text.corpora import CORPORA, split
from lm_from_scratch.text.plots import (
    EVENT_WEIGHTS,
    QUESTION_WEIGHTS,
    PlotConfig,
    choose,
    make_plot,
    next_event,
    stories,
    ways,
)
from lm_from_scratch.text.story_grammar import (
    BOXES,
    EVENTS,
    PEOPLE,
    QUESTIONS,
    ROOMS,
    SLOTS,
    THINGS,
    Sentence,
    cut,
    read,
    slots,
)
from lm_from_scratch.text.worlds import World


def test_a_seed_gives_the_stories_that_the_shipped_model_has_read() -> None:
    text = "\n".join(document.text for document in stories(50))
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "e80dfa2b82cdb41c2612d95832c60f6d78e120a6b42c23be96366833c3511dca"
    assert stories(2, seed=1) != stories(2)


def test_both_languages_tell_one_plot_on_one_side_of_the_split() -> None:
    documents = stories(60)
    for english, chinese in zip(documents[::2], documents[1::2], strict=True):
        assert english.group == chinese.group
        assert [read(text) for text in cut(english.text)] == [read(t) for t in cut(chinese.text)]
    train, held_out = split(documents, held_out=0.2)
    assert len(train) + len(held_out) == 120
    assert not {d.group for d in train} & {d.group for d in held_out}
    assert {d.name.split("/")[0] for d in held_out} == {"english", "chinese"}


def test_the_corpus_has_its_name() -> None:
    assert CORPORA["worlds"] is stories
    documents = stories(500)
    assert len(documents) == len({d.text for d in documents}) == 1000


def test_a_story_has_as_much_as_is_asked_for() -> None:
    config = PlotConfig(people=6, rooms=5, boxes=3, things=7, events=30, ask=0.9)
    plot = make_plot(config, Random(0))
    world = World()
    for sentence in plot:
        world.follow(sentence)
    for names, n in ((PEOPLE, 6), (BOXES, 3), (THINGS, 7)):
        assert sum(name in names for name in world.place) == n
    assert sum(sentence.kind in EVENTS for sentence in plot) == 30
    assert sum(sentence.kind in QUESTIONS for sentence in plot) > 60  # about nine after each
    assert plot[-2].kind in QUESTIONS
    rooms = {word for sentence in plot for word in sentence.words if word in ROOMS}
    assert len(rooms) == 5


def test_no_question_is_asked_twice_in_a_row() -> None:
    plot = make_plot(PlotConfig(people=2, boxes=1, things=1, events=30, ask=0.9), Random(0))
    since: set[Sentence] = set()
    for sentence in plot:
        if sentence.kind in EVENTS:
            since = set()
        elif sentence.kind in QUESTIONS:
            assert sentence not in since
            since.add(sentence)
    assert sum(s.kind in QUESTIONS for s in make_plot(PlotConfig(ask=0.0), Random(0))) == 1


def test_everything_happens_and_as_often_as_it_should() -> None:
    kinds = [s.kind for n in range(300) for s in make_plot(PlotConfig(events=20), Random(n))]
    for names, weights in ((EVENTS, EVENT_WEIGHTS), (QUESTIONS, QUESTION_WEIGHTS)):
        assert all(kinds.count(kind) > 50 for kind in names)
        assert len(names) == len(weights)
    assert kinds.count("where") / kinds.count("what has") == pytest.approx(5, rel=0.25)


def test_ways_are_exactly_the_events_that_a_world_allows() -> None:
    """Of all events that the grammar can say about this world, those that are not refused."""
    rng = Random(3)
    plot = make_plot(PlotConfig(people=3, rooms=3, boxes=2, things=2, events=9), rng)
    world = World()
    for sentence in plot:
        world.follow(sentence)
    rooms = ["hall", "attic", *{world.chain(what)[-1] for what in world.place}]
    names = [*world.place, *rooms]
    for kind in EVENTS:
        possible = {(who, *words) for who in world.place if who in PEOPLE
                    for words in ways(world, kind, who, rooms)}  # fmt: skip
        allowed = set()
        for words in _all_words(kind, names):
            trial = World(dict(world.place))
            try:
                trial.follow(Sentence(kind, words))
            except ValueError:
                continue
            allowed.add(words)
        assert possible == allowed, kind


def _all_words(kind: str, names: list[str]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [()]
    for slot in slots(kind):
        found = [(*words, name) for words in found for name in names if name in SLOTS[slot]]
    return found


def test_a_single_person_with_a_box_always_finds_something_to_do() -> None:
    config = PlotConfig(people=1, rooms=1, boxes=1, things=1, events=40)
    for seed in range(20):
        make_plot(config, Random(seed))


def test_next_event_can_happen() -> None:
    world = World({"Mia": "hall", "box": "hall"})
    for seed in range(50):
        trial = World(dict(world.place))
        trial.follow(next_event(trial, ["hall", "attic"], Random(seed)))


def test_choose_keeps_to_its_weights() -> None:
    rng = Random(0)
    drawn = [choose(rng, "abc", (1, 0, 3)) for _ in range(4000)]
    assert "b" not in drawn and drawn.count("c") / 4000 == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"people": 0}, "people=0 must be an integer, at least 1"),
        ({"people": 11}, "people=11 must be at most 10"),
        ({"rooms": 9}, "rooms=9 must be at most 8"),
        ({"boxes": 6}, "boxes=6 must be at most 5"),
        ({"things": 13}, "things=13 must be at most 12"),
        ({"events": 2.5}, "events=2.5 must be an integer"),
        ({"ask": 1.5}, r"ask=1.5 must be in \[0, 1\)"),
    ],
)
def test_impossible_numbers_are_refused(numbers: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlotConfig(**numbers)


def test_no_stories_and_no_seed_are_refused() -> None:
    with pytest.raises(ValueError, match="n_plots=0 must be an integer, at least 1"):
        stories(0)
    with pytest.raises(ValueError, match="seed=-1 must be an integer, at least 0"):
        stories(1, seed=-1)
