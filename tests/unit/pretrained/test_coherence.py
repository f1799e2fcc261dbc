"""The shipped storyteller is what its record says."""

import pytest
from shipped import RECORDS

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.instruments.storyteller import answered, new_plots
from lm_from_scratch.pretrained import make
from lm_from_scratch.pretrained.coherence import SIZES
from lm_from_scratch.pretrained.readme import readme
from lm_from_scratch.text.story_grammar import LANGUAGES

RECORD = RECORDS["worlds"]


@pytest.mark.slow
def test_its_text_is_still_what_the_generator_makes() -> None:
    _, held_out = make.corpus_of(RECORD)
    assert make.digest(held_out) == RECORD["held_out_sha256"]
    assert {d.name.split("/")[0] for d in held_out} == set(LANGUAGES)


def test_it_beats_every_baseline() -> None:
    bits = [value["bits_per_byte"] for value in RECORD["baselines"].values()]
    assert RECORD["held_out"]["all"]["bits_per_byte"] < min(bits)


@pytest.mark.parametrize("language", LANGUAGES)
def test_it_answers_as_often_as_recorded(language: str) -> None:
    model, tokenizer = load_shipped("worlds")
    counts = answered(model.float(), tokenizer, new_plots(40), language).values()
    share = sum(right for right, _ in counts) / sum(n for _, n in counts)
    recorded = RECORD["worlds"][language]["questions"]["as trained"]["share"]
    assert share == pytest.approx(recorded, abs=0.1)


def test_its_readme_says_each_size() -> None:
    assert all(name in readme(RECORD) for name in SIZES)
