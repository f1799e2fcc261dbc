"""Text from text: a prompt is tokenised, and what follows is decoded piece by piece."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from lm_from_scratch.generation.generate import generate
from lm_from_scratch.generation.logit_processors import LogitProcessor, sequence
from lm_from_scratch.generation.sampling import Sampler
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.text.tokenizer import Tokenizer


def generate_text(
    model: CausalLM,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int = 200,
    sampler: Sampler | None = None,
    seed: int = 0,
    stop: Collection[str] = (),
    processors: Sequence[LogitProcessor] = (),
) -> Iterator[str]:
    """Yield the text that follows ``prompt``, piece by piece, until the model ends the document.

    The prompt stands at the start of a new document, by the tokenizer's own rule. Prompt and pieces
    together are what the tokenizer decodes, with its spaces. The text ends before the first of the
    ``stop`` strings, wherever the borders of its tokens are.
    """
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = tokenizer.start(prompt)
    steps = generate(model, [ids], max_new_tokens, sampler, ends, seed=seed, processors=processors)
    tokens = (step[0] for step in steps)
    words = (token for token in tokens if token is not None and token not in ends)
    return until(tokenizer.stream(words, after=ids), stop)


def until(pieces: Iterable[str], stop: Collection[str]) -> Iterator[str]:
    """The text of ``pieces`` up to the first of the ``stop`` strings, which is not part of it.

    The first is the one that ends first; of those that end together, the longest. So the borders of
    the pieces change nothing: at the moment when it is complete, no other one was. What could be
    the beginning of a stop string waits until it is known. Raises ``ValueError`` for an empty stop
    string.
    """
    stop = [stop] if isinstance(stop, str) else sequence("stop", stop)
    if not all(isinstance(string, str) and string for string in stop):
        raise ValueError(f"stop={stop} must hold strings, none of which is empty")
    return _until(pieces, stop)


def _until(pieces: Iterable[str], stop: Collection[str]) -> Iterator[str]:
    waiting = ""
    for piece in pieces:
        waiting += piece
        matches = [(waiting.find(string), len(string)) for string in stop if string in waiting]
        if matches:
            start, _ = min(matches, key=lambda at: (sum(at), -at[1]))
            if start:
                yield waiting[:start]
            return
        begun = max(
            (n for string in stop for n in range(1, len(string)) if waiting.endswith(string[:n])),
            default=0,
        )
        text, waiting = waiting[: len(waiting) - begun], waiting[len(waiting) - begun :]
        if text:
            yield text
    if waiting:
        yield waiting
