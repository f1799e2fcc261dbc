"""How many of a model's answers to the questions of a task are right.

Exact match is the strictest measure there is: one wrong digit, or a word after the answer, and it
does not count. A task with several right answers accepts each of them.
"""

from collections.abc import Sequence
from typing import Any

from lm_from_scratch.checkpoint.published import NOTHING, Published, end_tokens
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.text.tasks import held_out_questions, prompt, task_named
from lm_from_scratch.text.tokenizer import Tokenizer

GREEDY = Sampler(temperature=0.0)

#: The model's own distribution.
SAMPLED = Sampler(temperature=1.0)

#: No right answer to a question of a usual size is longer.
MAX_NEW_TOKENS = 40


def answers(
    model: CausalLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampler: Sampler = GREEDY,
    seed: int = 0,
    batch_size: int = 250,
    published: Published = NOTHING,
) -> list[str]:
    """What the model says after each prompt, up to the token that ends it, which may be
    ``published`` with the model."""
    ends = end_tokens(model, tokenizer, published)
    texts = []
    for i in range(0, len(prompts), batch_size):
        ids = [tokenizer.start(prompt) for prompt in prompts[i : i + batch_size]]
        steps = generate(model, ids, MAX_NEW_TOKENS, sampler, ends, seed=seed + i)
        for start, row in zip(ids, complete(steps), strict=True):
            words = [token for token in row if token not in ends]
            texts.append(tokenizer.decode(words, after=start))
    return texts


def exact_match(
    model: CausalLM,
    tokenizer: Tokenizer,
    name: str,
    questions: Sequence[str],
    sampler: Sampler = GREEDY,
    seed: int = 0,
) -> float:
    """The share of the questions of a task that the model answers rightly."""
    task = task_named(name)
    given = answers(model, tokenizer, [prompt(name, q) for q in questions], sampler, seed)
    right = [task.is_right(q, answer) for q, answer in zip(questions, given, strict=True)]
    return sum(right) / len(right)


def of_task(model: CausalLM, tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    """Of one task: 500 held-out questions as they occur in the training text, the likeliest answer
    and one that is drawn; and 200 of every size, with three sizes that do not occur."""
    task = task_named(name)
    asked = held_out_questions(name, 500)
    by_size = {}
    for size in range(task.sizes.start, min(task.sizes.stop + 3, task.most + 1)):
        of_size = held_out_questions(name, 200, [size])
        share = exact_match(model, tokenizer, name, of_size)
        by_size[str(size)] = {"questions": len(of_size), "greedy": round(share, 4)}
    held_out: dict[str, float] = {"questions": len(asked)}
    for way, sampler in (("greedy", GREEDY), ("sampled", SAMPLED)):
        held_out[way] = round(exact_match(model, tokenizer, name, asked, sampler), 4)
    return {"held_out": held_out, "sizes": by_size}
