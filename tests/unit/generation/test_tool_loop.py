"""tool_loop.py: what the model says around a result is what it would say after the same text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tiny_models import tiny_gpt2
from torch import Tensor

from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY, Sampler
from lm_from_scratch.generation.tool_loop import (
    CALL,
    RESULT,
    Token,
    generate_with_tool,
    special_ids,
)
from lm_from_scratch.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train([], 259, [CALL, RESULT])
MODEL = tiny_gpt2(vocab_size=259, block_size=96)
PROMPT = TOKENIZER.start("2+3=")
STOP = [TOKENIZER.eos_token_id or 0]


def add(text: str) -> str:
    return str(sum(int(number) for number in text.split("+")))


class Writes:
    """A sampler that chooses the tokens of a text, and keeps the logits it is given."""

    def __init__(self, text: str) -> None:
        self.tokens: Iterator[int] = iter(TOKENIZER.encode(text, special=True))
        self.logits: list[Tensor] = []

    def __call__(self, logits: Tensor, seen: Tensor, u: Tensor) -> Tensor:
        self.logits.append(logits[0].clone())
        self.seen = seen[0].clone()
        return torch.tensor([next(self.tokens)])


def run(
    text: str, tool: Callable[[str], str] = add, max_new_tokens: int = 80, max_calls: int = 4
) -> tuple[list[Token], Writes]:
    writes = Writes(text + "<|endoftext|>")
    steps = generate_with_tool(
        MODEL, TOKENIZER, PROMPT, max_new_tokens, tool, writes, STOP, max_calls
    )  # type: ignore[arg-type]  # any callable of these arguments is a sampler
    return list(steps), writes


def said(tokens: list[Token], given: bool = True) -> str:
    return TOKENIZER.decode([token.id for token in tokens if token.given == given])


@pytest.mark.parametrize("sampler", [GREEDY, Sampler(temperature=1.5, repetition_penalty=1.3)])
def test_without_a_call_it_is_plain_generation(sampler: Sampler) -> None:
    special = special_ids(TOKENIZER, CALL, RESULT)

    def never_calls(logits: Tensor, seen: Tensor, u: Tensor) -> Tensor:
        return sampler(logits.index_fill(1, torch.tensor(special), -torch.inf), seen, u)

    options = {"sampler": never_calls, "stop_tokens": STOP, "seed": 3}
    plain = complete(generate(MODEL, [PROMPT], 40, **options))[0]  # type: ignore[arg-type]
    ours = list(generate_with_tool(MODEL, TOKENIZER, PROMPT, 40, add, **options))  # type: ignore[arg-type]
    assert ours == [Token(token) for token in plain]


def test_a_result_is_read_into_the_same_cache() -> None:
    """Every choice is made on the logits of one pass over all that was there."""
    tokens, writes = run(f"a{CALL}20+3{RESULT}23, {CALL}4+4{RESULT}8")
    assert said(tokens) == "23\n8\n"
    assert said(tokens, given=False) == f"a{CALL}20+3{RESULT}23, {CALL}4+4{RESULT}8<|endoftext|>"
    ids = [*PROMPT, *(token.id for token in tokens)]
    whole = MODEL(torch.tensor([ids]))[0]
    places = [n for n, token in enumerate(tokens, len(PROMPT) - 1) if not token.given]
    torch.testing.assert_close(torch.stack(writes.logits), whole[places])
    assert set(writes.seen.nonzero().flatten().tolist()) == set(ids[:-1])


def test_an_error_becomes_text() -> None:
    def fails(text: str) -> str:
        raise ArithmeticError("no\nsuch sum" if text else "")

    assert (
        said(run(f"{CALL}2+{RESULT}")[0]) == "error: invalid literal for int() with base 10: ''\n"
    )
    assert said(run(f"{CALL}2{RESULT}{CALL}{RESULT}", fails)[0]) == (
        "error: no such sum\nerror: ArithmeticError\n"
    )


def test_half_a_character_becomes_an_error_too() -> None:
    assert said(run(f"{CALL}2{RESULT}", lambda text: "\ud800")[0]).startswith("error: 'utf-8'")


def test_calls_have_a_limit() -> None:
    asked: list[str] = []
    tokens, _ = run(
        f"{CALL}1{RESULT}{CALL}2{RESULT}", lambda text: asked.append(text) or "ok", 80, 1
    )
    assert asked == ["1"] and said(tokens) == "ok\nerror: more than 1 calls\n"


def test_the_length_counts_results() -> None:
    for limit in range(1, 12):
        tokens, _ = run(f"{CALL}9+9{RESULT}18", max_new_tokens=limit)
        assert len(tokens) == min(limit, 11)


def test_a_tool_cannot_open_a_call() -> None:
    tokens, _ = run(f"{CALL}1{RESULT}", lambda text: f"{CALL}2{RESULT}<|endoftext|>")
    assert {*special_ids(TOKENIZER, CALL, RESULT), *STOP}.isdisjoint(
        t.id for t in tokens if t.given
    )
    assert said(tokens) == f"{CALL}2{RESULT}<|endoftext|>\n"


def test_what_was_not_opened_is_no_call() -> None:
    assert said(run(f"1+1{RESULT}2{CALL}3{CALL}4{RESULT}{RESULT}")[0]) == "4\n"


def test_bad_arguments_are_refused() -> None:
    plain = Tokenizer.train([], 257)
    with pytest.raises(ValueError, match=r"no token <\|tool_call\|>"):
        generate_with_tool(MODEL, plain, PROMPT, 8, add)
    with pytest.raises(ValueError, match="max_calls=-1"):
        generate_with_tool(MODEL, TOKENIZER, PROMPT, 8, add, max_calls=-1)
    with pytest.raises(ValueError, match="do not fit into"):
        generate_with_tool(MODEL, TOKENIZER, PROMPT, 97, add)
