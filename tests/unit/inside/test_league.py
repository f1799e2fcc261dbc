"""A league whose laws hold: what must flip flips, and what knows nothing is at chance."""

import json

import pytest
import torch
from torch import Tensor

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.inside.dictionary import Dictionary
from lm_from_scratch.inside.league import (
    Round,
    as_json,
    league,
    mean_difference,
    other_story,
    probe,
    rounds,
    through_features,
    through_lens,
)
from lm_from_scratch.inside.lens import logit_lens
from lm_from_scratch.inside.patching import run
from lm_from_scratch.inside.sites import Site, activations, stream_sites
from lm_from_scratch.text.story_grammar import ROOMS


@pytest.fixture(scope="module")
def played() -> list[Round]:
    model, tokenizer = load_shipped("worlds")
    return rounds(model.float(), tokenizer, seeds=2, labelled=80, new=24)


def test_slots_are_what_the_whole_model_has_there(played: list[Round]) -> None:
    slots = played[0].new
    q, model = slots.questions, slots.model
    logits, kept = activations(model, q.idx, stream_sites(model), positions=q.positions)
    whole = torch.stack([x[:, -1] for x in kept.values()])
    torch.testing.assert_close(slots.states, whole, atol=1e-4, rtol=1e-4)
    assert torch.equal(slots.said, q.said(logits))
    new = slots.states[2].flip(0)

    def last(x: Tensor) -> Tensor:
        return torch.cat([x[:, :-1], new[:, None]], 1)

    logits = run(model, q.idx, {Site("stream", 2): last}, positions=q.positions)
    for _ in range(2):  # nothing is left behind
        assert torch.equal(slots.said_with(2, new), q.said(logits))
        assert torch.equal(slots.said_with(2, slots.states[2]), slots.said)


def test_an_edit_that_fails_leaves_the_stories_as_they_were_read(played: list[Round]) -> None:
    slots = played[0].new
    with pytest.raises(ValueError, match="x has 3 features"):
        slots.said_with(4, slots.states[4][:, :3])
    assert torch.equal(slots.cache.lengths, slots.before)
    assert torch.equal(slots.said_with(2, slots.states[2]), slots.said)


def test_a_model_in_half_precision_plays() -> None:
    model, tokenizer = load_shipped("worlds")
    stories = rounds(model.bfloat16(), tokenizer, seeds=1, labelled=80, new=8)
    assert stories[0].new.states.dtype == torch.float32
    lens = through_lens(logit_lens(model), stories[0].new.questions.words)
    methods = {"probe": probe, "mean": mean_difference, "lens": lens, "other": other_story}
    rows = league(stories, methods, 4, sizes=(None,))
    assert min(row.flips[0][0] for row in rows[2:]) > 0.8 and rows[1].recovered[0] > 0.6


def test_the_state_of_another_story_flips_what_it_must(played: list[Round]) -> None:
    """At the end the model says what the state says; in front of block 0 there is only the last
    word, which is the same in all stories."""
    for layer, least, most in ((4, 1, 1), (0, 0, 0.3)):
        (guess, row) = league(played, {"other": other_story}, layer, sizes=(None,))
        assert least <= min(row.flips[0]) <= max(row.flips[0]) <= most
        assert max(guess.flips[0]) < 0.3 < min(guess.recovered)


@pytest.mark.parametrize("layer", [2, 4])
def test_linear_methods_read_what_they_wrote(played: list[Round], layer: int) -> None:
    known, x = played[0].labelled, played[0].new.states[layer]
    rooms = torch.arange(len(x)) % len(ROOMS)
    read, write = mean_difference(known.model, layer, known.states[layer], known.questions.rooms)
    assert torch.equal(read(write(x, rooms)), rooms)
    read, write = probe(known.model, layer, known.states[layer], known.questions.rooms)
    said = read(write(x, rooms))
    assert torch.equal(said[said >= 0], rooms[said >= 0]) and (said >= 0).any()


def test_a_probe_on_shuffled_labels_is_at_chance(played: list[Round]) -> None:
    def shuffled(model, layer, states, rooms):
        return probe(model, layer, states, rooms[torch.randperm(len(rooms))])

    torch.manual_seed(0)
    _, row, other = league(played, {"probe": probe, "shuffled": shuffled}, 4)
    assert min(row.recovered) > 0.5 > 0.35 > max(other.recovered)


def test_at_the_end_the_logit_lens_is_the_model(played: list[Round]) -> None:
    s = played[0]
    words = s.new.questions.words
    method = through_lens(logit_lens(s.new.model), words)
    read, _ = method(s.new.model, 4, s.labelled.states[4], s.labelled.questions.rooms)
    said = read(s.new.states[4])
    assert torch.equal(said[said >= 0], s.new.said[said >= 0]) and (said >= 0).double().mean() > 0.9


def test_a_dictionary_with_a_feature_for_each_room_reads_and_writes_it() -> None:
    """On states that are a direction for each room: all is recovered, and what is written is the
    state of the other room."""
    dictionary = Dictionary(8, 8, 1)
    dictionary.directions.data = dictionary.encoder.data = torch.eye(8)
    rooms = torch.arange(16) % 8
    states = 3 * torch.eye(8)[rooms]
    read, write = through_features({0: dictionary})(None, 0, states, rooms)
    assert torch.equal(read(states), rooms)
    torch.testing.assert_close(write(states, rooms.flip(0)), states.flip(0))
    assert read(torch.zeros(1, 8)).tolist() == [-1]


def test_a_feature_that_never_met_its_room_names_none() -> None:
    """The dictionary knows no direction of room 7, whose states are none of its others."""
    dictionary = Dictionary(8, 7, 1)
    dictionary.directions.data = torch.eye(8)[:7]
    dictionary.encoder.data = torch.eye(8)[:, :7]
    rooms = torch.arange(16) % 8
    states = 3 * torch.eye(8)[rooms]
    read, _ = through_features({0: dictionary})(None, 0, states, rooms)
    assert torch.equal(read(states), torch.where(rooms < 7, rooms, -1))


def test_a_row_has_a_number_for_each_round_and_size(played: list[Round]) -> None:
    def silent(model, layer, states, rooms):
        return lambda x: torch.full((len(x),), -1), lambda x, new: x

    rows = league(played, {"silent": silent}, 3, sizes=(None, 1, 2))
    again = json.loads(as_json(rows))
    assert [row["method"] for row in again] == ["guess", "silent"]
    assert again[1]["recovered"] == again[1]["false_claims"] == [0, 0]
    assert again[0]["flips"] == again[1]["flips"] and len(again[1]["flips"]) == 3


def test_a_room_without_a_story_is_refused() -> None:
    model, tokenizer = load_shipped("worlds")
    with pytest.raises(ValueError, match="labelled=3 stories do not end in all 8 rooms"):
        rounds(model.float(), tokenizer, seeds=1, labelled=3, new=2)


def test_a_size_is_a_length_and_the_methods_own_does_not_count(played: list[Round]) -> None:
    """Who writes a change ten times as long flips as many once both have the same size."""

    def long(model, layer, states, rooms):
        read, write = mean_difference(model, layer, states, rooms)
        return read, lambda x, new: x + 10 * (write(x, new) - x)

    _, a, b = league(played, {"as it is": mean_difference, "long": long}, 3, sizes=(None, 1))
    assert a.flips[1] == b.flips[1] and a.flips[0] != b.flips[0]
