"""A model that uses a tool: it writes a call, a program runs it, and the model goes on after the
result.

====  ======================================  ===================  ====================
by    the model                               the tool             the model
text  ``<|tool_call|>123+45<|tool_result|>``  ``168``, a line end  ``168<|endoftext|>``
====  ======================================  ===================  ====================

The tool's text is read as a prompt is, into the same cache: nothing is read twice. It is spelled
letter by letter, so that no tool can open a call or end the document. In training its tokens are no
targets (:mod:`lm_from_scratch.text.conversations`): the model is to read them, not to guess them.

Source: Schick et al., *Toolformer: Language Models Can Teach Themselves to Use Tools*, 2023,
arXiv:2302.04761.
"""

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import torch

from lm_from_scratch.generation.generate import (
    Chooser,
    cache_with_room,
    check_prompts,
    check_seed,
    prefill,
)
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.limits import Whole, require
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.text.tokenizer import Tokenizer

CALL, RESULT = "<|tool_call|>", "<|tool_result|>"
END = "\n"  # of a result


class Token(NamedTuple):
    """A token of an answer, and whether the tool has said it."""

    id: int
    given: bool = False


def special_ids(tokenizer: Tokenizer, *names: str) -> list[int]:
    """The ids of special tokens. Raises ``ValueError`` for a name that is not one token."""
    ids = []
    for name in names:
        encoded = tokenizer.encode(name, special=True)
        if len(encoded) != 1:
            raise ValueError(f"the tokenizer has no token {name}")
        ids.append(encoded[0])
    return ids


def generate_with_tool(
    model: CausalLM,
    tokenizer: Tokenizer,
    prompt: list[int],
    max_new_tokens: int,
    tool: Callable[[str], str],
    sampler: Sampler | None = None,
    stop_tokens: Collection[int] = (),
    max_calls: int = 4,
    seed: int = 0,
) -> Iterator[Token]:
    """Yield the tokens that follow the ids ``prompt``, as
    :func:`~lm_from_scratch.generation.generate.generate` does, with what the ``tool`` says.

    The tool is given the text of a call. An exception of it becomes a result, ``error: ...``, and
    so does every call after ``max_calls``: the model can go on. ``max_new_tokens`` counts results
    too. Raises ``ValueError`` where ``generate`` does, and for a tokenizer without the two tokens.
    """
    require(Whole, max_calls=max_calls)
    (ids,) = check_prompts(model, [prompt], max_new_tokens, stop_tokens)
    check_seed(seed, 1)
    call, result = special_ids(tokenizer, CALL, RESULT)

    def steps() -> Iterator[Token]:
        choose = Chooser([ids], sampler or Sampler(), seed=seed)
        cache = cache_with_room(model, [ids], max_new_tokens)
        device = model.head.weight.device
        new, left, calls = ids, max_new_tokens, 0
        asked: list[int] | None = None  # the tokens of a call that is being written
        while True:
            logits = prefill(model, torch.tensor([new], device=device), cache)  # the new ones alone
            token = int(choose(logits))
            yield Token(token)
            left -= 1
            if token in stop_tokens or not left:
                return
            new = [token]
            if token == result and asked is not None:
                calls += 1
                answer = _answer(tool, tokenizer.decode(asked, after=[call]), calls, max_calls)
                given = tokenizer.encode(answer + END)[:left]
                choose.read(given)
                yield from (Token(one, given=True) for one in given)
                new, left, asked = [token, *given], left - len(given), None
                if not left:
                    return
            elif token == call:
                asked = []
            elif asked is not None:
                asked.append(token)

    return steps()


def _answer(tool: Callable[[str], str], text: str, calls: int, max_calls: int) -> str:
    if calls > max_calls:
        return f"error: more than {max_calls} calls"
    try:
        answer = str(tool(text))
        answer.encode()  # half a character cannot be said
        return answer
    except Exception as error:  # whatever a tool raises, the model reads it
        return "error: " + (" ".join(str(error).split()) or type(error).__name__)
