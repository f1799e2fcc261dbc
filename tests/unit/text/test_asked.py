"""Stories that end before a room: the truth is known, a counterfactual differs in a word."""

from random import Random

import pytest
import torch

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.models.modes import evaluating
from lm_from_scratch.text.asked import Asked, asked, batch, counterfactual, two_questions
from lm_from_scratch.text.plots import PlotConfig
from lm_from_scratch.text.story_grammar import ROOMS, Sentence, read


def test_a_story_ends_before_its_room() -> None:
    plot = (
        Sentence("is in", ("Mia", "hall")),
        Sentence("has", ("Mia", ("key",))),
        Sentence("go", ("Mia", "kitchen")),
    )
    key, mia = Asked(plot, "key"), Asked(plot, "Mia")
    assert key.text == (
        "Mia is in the hall. Mia has the key. Mia goes to the kitchen. Where is the key? "
        "Mia has the key, in the"
    )
    assert (key.room, key.chain) == ("kitchen", ["Mia", "kitchen"])
    assert mia.text.endswith("Where is Mia? Mia is in the")
    with pytest.raises(ValueError, match="has not mentioned Tom"):
        Asked(plot, "Tom").room  # noqa: B018


def test_answers_are_sentences_and_seeds_repeat() -> None:
    stories = asked(50, seed=3)
    assert stories == asked(50, seed=3) != asked(50, seed=4)
    for story in stories:
        answer = story.text[story.text.index("? ") + 2 :]
        assert read(f"{answer} {story.room}.").words[-1] == story.room
    assert len({story.room for story in stories}) > 4


def test_counterfactuals_differ_in_one_word_and_in_the_answer() -> None:
    rng, pairs = Random(0), 0
    for story in asked(40):
        other = counterfactual(story, rng)
        if other is not None:
            pairs += 1
            a, b = story.text.split(), other.text.split()
            assert len(a) == len(b) and sum(x != y for x, y in zip(a, b)) == 1
            assert other.room != story.room
    assert pairs > 25


def test_rows_of_a_batch_end_where_the_room_is_due() -> None:
    model, tokenizer = load_shipped("worlds")
    stories = asked(24)
    together = batch(stories, tokenizer)
    assert together.idx[:, -1].unique().tolist() == tokenizer.encode(" the")
    assert [list(ROOMS)[i] for i in together.rooms] == [story.room for story in stories]
    with evaluating(model):
        said = together.said(model.float()(together.idx, positions=together.positions))
        alone = [batch([one], tokenizer) for one in stories[:4]]
        each = [one.said(model(one.idx, positions=one.positions)) for one in alone]
    assert torch.equal(said[:4], torch.cat(each))
    assert (said == together.rooms).double().mean() > 0.6


def test_stories_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="what='kitchen' is in no story"):
        asked(1, what="kitchen")
    with pytest.raises(ValueError, match="must have two people and two rooms at least"):
        two_questions(1, config=PlotConfig(people=2, rooms=1))


def test_two_questions_differ_in_a_name_and_in_the_room() -> None:
    for one, other in two_questions(20, seed=3):
        assert one.plot == other.plot and one.room != other.room
        assert one.text.endswith(f"Where is {one.what}? {one.what} is in the")
        assert other.text.endswith(f"Where is {other.what}? {other.what} is in the")
