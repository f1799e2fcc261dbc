r"""Questions with answers, of which a model learns the answers: instruction tuning.

A language model continues whatever it is given. It becomes an assistant by learning from examples
of which only the answer counts: the question is read, and no target asks for its tokens.

======  ================  ====  ====  =====  ==============  ==============
token   ``<|im_start|>``  user  Hi    ...    ``4``           ``<|im_end|>``
target  -100              -100  -100  ``4``  ``<|im_end|>``  -100
======  ================  ====  ====  =====  ==============  ==============

Chats become text by the template that belongs to the tokenizer (:mod:`lm_from_scratch.text.chat`).

Source: Ouyang et al., *Training Language Models to Follow Instructions with Human Feedback*, 2022,
arXiv:2203.02155.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lm_from_scratch.text.batch import Batch, padded_batch
from lm_from_scratch.text.chat import render
from lm_from_scratch.text.streaming import common
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Answered:
    """Token ids, and which of them the model is to write itself. Raises ``ValueError`` if there is
    none of these: the first token of all follows nothing, so it cannot be learned."""

    ids: list[int]
    answer: list[bool]

    def __post_init__(self) -> None:
        if not any(self.answer[1:]):
            raise ValueError("no token is to be written: the answer is empty, or follows nothing")


#: Texts before a completion that it does not merge with, so that its own first token has no space.
NEIGHBOURS = ("", "\n", "=", "a", "1")


def continued(tokenizer: Tokenizer, prompt: str, completion: str) -> tuple[list[int], list[int]]:
    """The tokens that a model starts from after ``prompt``, and those of the ``completion``.

    They become tokens together, because a text alone is another one to many tokenizers: ``cat`` at
    the start of a text is ``▁cat``, with a space that ``the=cat`` does not have. The completion is
    what follows the tokens of the prompt.

    Where a token reaches over the border (``the `` and ``cat`` are ``the`` and ``▁cat``), the
    prompt keeps the tokens that generation starts from, and the completion gets tokens that go on
    from them to the same text. If there are none, the completion begins where the tokens of both
    part, as in the library ``trl``.
    """
    question, together = tokenizer.start(prompt), tokenizer.start(prompt + completion)
    if together[: len(question)] == question:
        return question, together[len(question) :]
    text = tokenizer.decode(together)
    for neighbour in NEIGHBOURS:
        before, ids = tokenizer.encode_batch([neighbour, neighbour + completion])
        answer = ids[len(before) :]
        if ids[: len(before)] == before and tokenizer.decode([*question, *answer]) == text:
            return question, answer
    border = common(question, together)
    return together[:border], together[border:]


def answered(tokenizer: Tokenizer, prompt: str, completion: str) -> Answered:
    """A plain text and what should follow it, up to and with the end token."""
    question, answer = continued(tokenizer, prompt, completion)
    if (end := tokenizer.eos_token_id) is not None:
        answer = [*answer, end]
    return Answered([*question, *answer], [False] * len(question) + [True] * len(answer))


def conversation(tokenizer: Tokenizer, messages: Sequence[Message], known: int = 0) -> Answered:
    """A chat by the tokenizer's template; all that the assistant says is to be written, with the
    token that ends its turn. The first ``known`` messages are given, whoever says them.

    What the template adds for an answer is what the text gains over the same chat without it and
    with the beginning of an answer. Raises ``ValueError`` for a template that writes an earlier
    message otherwise when more follow, for a message that is no text, and for a chat in which the
    assistant says nothing.
    """
    text = render(tokenizer.files, messages, add_generation_prompt=False)
    spans = []
    for i, message in enumerate(messages):
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise ValueError(f"message {i} has no text as its content")
        if message["role"] != "assistant" or i < known:
            continue
        if i == 0:
            raise ValueError("a chat must begin with a question, not with what the assistant says")
        before = render(tokenizer.files, messages[:i])
        after = render(tokenizer.files, messages[: i + 1], add_generation_prompt=False)
        if not (after.startswith(before) and text.startswith(after)):
            raise ValueError(
                f"the chat template writes message {i} otherwise when others follow: what the "
                "assistant says cannot be told from the rest"
            )
        spans.append((len(before), len(after.rstrip())))  # what follows the turn is the template's
    if not spans:
        raise ValueError("the assistant says nothing in this chat: there is nothing to learn")
    ids, places = tokenizer.spans(text)
    answer = [any(start < last and first < end for first, last in spans) for start, end in places]
    return Answered(ids, answer)


def targets_of(examples: Sequence[Answered]) -> Batch:
    """The examples as one batch, padded on the right: the target of each token is the next one,
    where that is part of an answer."""
    batch = padded_batch([example.ids for example in examples], pad_token_id=0)
    for row, example in zip(batch.targets, examples, strict=True):
        given = torch.tensor(example.answer[1:], dtype=torch.bool)
        row[: len(given)].masked_fill_(~given, IGNORE)
    return batch
