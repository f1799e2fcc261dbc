"""Laws of a world, and faults that are put into stories and found."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_from_scratch.text.plots import PlotConfig, make_plot
from lm_from_scratch.text.story_grammar import (
    BOXES,
    EVENTS,
    LANGUAGES,
    PEOPLE,
    QUESTIONS,
    ROOMS,
    THINGS,
    Sentence,
    cut,
    write,
)
from lm_from_scratch.text.worlds import World, check

START = "Mia is in the hall. Tom is in the hall. The box is in the hall. Mia has the key. "


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_everything_is_in_one_place_of_its_kind_after_each_sentence(seed: int) -> None:
    world = World()
    allowed = {name: {*ROOMS} for name in PEOPLE}
    allowed |= {name: {*ROOMS, *PEOPLE} for name in BOXES}
    allowed |= {name: {*ROOMS, *PEOPLE, *BOXES} for name in THINGS}
    for sentence in make_plot(PlotConfig(people=4, things=5, events=20), Random(seed)):
        before = dict(world.place)
        world.follow(sentence)
        assert before.keys() <= world.place.keys()
        for what, at in world.place.items():
            assert at in allowed[what] and world.chain(what)[-1] in ROOMS
            assert what in PEOPLE or what in world.within(at)
        if sentence.kind not in EVENTS:  # words move nothing
            assert before.items() <= world.place.items()


@given(st.integers(0, 2**32), st.sampled_from(LANGUAGES))
@settings(max_examples=60, deadline=None)
def test_generated_stories_hold_together(seed: int, language: str) -> None:
    plot = make_plot(PlotConfig(events=12), Random(seed))
    report = check(write(plot, language))
    assert report.faults == []
    assert report.sentences == report.readable == len(plot)
    assert report.events == report.possible == 12
    assert report.questions == report.right == sum(s.kind in QUESTIONS for s in plot) > 0


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_an_impossible_event_moves_nothing(seed: int) -> None:
    """Sentences in any order: those that are refused leave the world as it was."""
    rng = Random(seed)
    plot = make_plot(PlotConfig(events=12), rng)
    rng.shuffle(plot)
    world = World()
    for sentence in plot:
        before = dict(world.place)
        try:
            world.follow(sentence)
        except ValueError:
            assert world.place == before


def test_the_story_of_the_key() -> None:
    story = START + (
        "Mia puts the key in the box. Tom takes the box to the kitchen. Where is the key? "
        "The key is in the box, in the kitchen. Who has the key? Tom has the key. "
        "What does Mia have? Mia has nothing. Tom empties the box. Where is the key? "
        "The key is in the kitchen. What is in the box? The box is empty. Mia joins Tom. "
        "Where is Mia? Mia is in the kitchen."
    )
    report = check(story)
    assert report.faults == [] and report.right == report.questions == 6


@pytest.mark.parametrize(
    ("end", "fault"),
    [
        ("Mia runs to the hall.", "impossible: Mia runs to the hall. Mia is there already."),
        ("Mia joins Tom.", "impossible: Mia joins Tom. Mia is there already."),
        ("Tom takes the key.", "impossible: Tom takes the key. The key does not lie there."),
        ("Tom puts down the key.", "impossible: Tom puts down the key. Tom does not have the key."),
        ("Tom takes the key out of the box.", "The key is not in it."),
        ("Tom empties the box.", "The box is empty."),
        ("Mia gives the key to Mia.", "Mia is not there."),
        ("Tom goes to the attic. Mia gives the key to Tom.", "Tom is not there."),
        ("Tom takes the box to the attic. Mia puts the key in the box.", "The box is not there."),
        ("Tom picks up the ball.", "the story has not mentioned ball"),
        ("Where is the ball?", "the story has not mentioned ball"),
        ("Mia is in the attic.", "not true: Mia is in the attic."),
        ("Tom has the key.", "not true: Tom has the key."),
        ("The ball is in the bag.", "the story has not mentioned bag"),
        ("The box is empty.", "an answer without a question: The box is empty."),
        ("Where is Tom? Tom is in the attic.", "wrong answer: Tom is in the attic. Right: Tom is"),
        ("Where is Tom? Mia is in the hall.", "wrong answer: Mia is in the hall. Right: Tom is"),
        ("Where is Tom?", "no answer, which is: Tom is in the hall."),
        ("Where is Tom? Tom is", "no sentence of the grammar: 'Tom is'"),
        ("Tom sings.", "no sentence of the grammar: 'Tom sings.'"),
        ("箱子里有什么？箱子里有钥匙。", "wrong answer: The box holds the key. Right: The box is"),
    ],
)
def test_a_planted_fault_is_found(end: str, fault: str) -> None:
    report = check(START + end)
    (found,) = report.faults
    assert fault in found and "\n" not in found


@given(st.integers(0, 2**32), st.sampled_from(LANGUAGES))
@settings(max_examples=40, deadline=None)
def test_a_wrong_answer_in_any_story_is_found(seed: int, language: str) -> None:
    """The last answer is exchanged for that to another question."""
    rng = Random(seed)
    plot = make_plot(PlotConfig(), rng)
    world = World()
    for sentence in plot[:-1]:
        world.follow(sentence)
    right = world.due
    others = [world.answer(Sentence("where", (w,))) for w in world.place if w not in PEOPLE]
    wrong = next(answer for answer in others if answer != right)
    report = check(write([*plot[:-1], wrong], language))
    assert len(report.faults) == 1 and report.right == report.questions - 1


def test_the_order_of_a_list_does_not_matter_but_its_things_do() -> None:
    story = START + "Mia picks up the box. What does Mia have? Mia has the "
    assert check(story + "box and the key.").faults == []
    assert check(story + "key and the box.").faults == []
    assert len(check(story + "key.").faults) == 1
    assert len(check(story + "key, the key and the box.").faults) == 1


def test_reports_add_up() -> None:
    one, two = check(START), check(START + "Tom sings. Mia goes to the attic.")
    both = one + two
    assert (both.sentences, both.readable, both.events, both.possible) == (10, 9, 1, 1)
    assert both.faults == two.faults


def test_a_story_without_a_sentence_has_no_fault() -> None:
    assert check("").sentences == 0 == len(cut(" \n"))
