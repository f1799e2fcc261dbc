"""exact_match: an answer is what the model says alone, and counts if it is right to the letter."""

import pytest

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.generation.text import generate_text
from lm_from_scratch.pretrained.exact_match import GREEDY, SAMPLED, answers, exact_match
from lm_from_scratch.text.tasks import held_out_questions, prompt

MODEL, TOKENIZER = load_shipped("tasks")


@pytest.mark.parametrize("sampler", [GREEDY, SAMPLED])
@pytest.mark.parametrize("batch_size", [3, 100])
def test_an_answer_is_what_the_model_says_alone(sampler: Sampler, batch_size: int) -> None:
    names = ("add", "sort", "countdown")
    prompts = [prompt(name, q) for name in names for q in held_out_questions(name, 3)]
    found = answers(MODEL, TOKENIZER, prompts, sampler, seed=5, batch_size=batch_size)
    end = "<|endoftext|>"
    alone = [
        "".join(generate_text(MODEL, TOKENIZER, p, 40, sampler, seed=5 + i))
        for i, p in enumerate(prompts)
    ]
    assert found == [text.removesuffix(end) for text in alone]


def test_the_share_is_that_of_the_sums_that_python_finds_right() -> None:
    questions = held_out_questions("add", 60)
    said = answers(MODEL, TOKENIZER, [prompt("add", q) for q in questions], SAMPLED, seed=1)
    right = sum(answer == str(eval(q)) for q, answer in zip(questions, said, strict=True))
    assert exact_match(MODEL, TOKENIZER, "add", questions, SAMPLED, seed=1) == right / 60
    assert right > 30
