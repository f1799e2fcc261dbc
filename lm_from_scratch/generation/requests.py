"""What goes into an engine and what it reports: a request, its state while it runs, a step."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lm_from_scratch.cache.paged import Row
from lm_from_scratch.generation.generate import Chooser
from lm_from_scratch.generation.logit_processors import LogitProcessor
from lm_from_scratch.generation.sampling import Sampler


@dataclass(eq=False, kw_only=True)
class Request:
    """One prompt, and how it is to be continued: the arguments of ``generate`` for one row."""

    prompt: Sequence[int]
    max_new_tokens: int
    sampler: Sampler = field(default_factory=Sampler)
    stop_tokens: Collection[int] = ()
    processors: Sequence[LogitProcessor] = ()
    seed: int = 0


@dataclass(eq=False)
class Running:
    """A request in the engine: its row of the pool holds the first tokens of ``tokens``."""

    number: int
    request: Request
    choose: Chooser
    start: int  # tokens of the prompt
    row: Row = field(default_factory=Row)
    prefix: int = 0  # the number of the prefix that the full blocks of its row hold; 0: nothing

    @property
    def tokens(self) -> list[int]:
        """The prompt and what was said so far."""
        return self.choose.rows[0]

    @property
    def new_tokens(self) -> list[int]:
        """The new tokens."""
        return self.tokens[self.start :]

    @property
    def finished(self) -> bool:
        """Whether its last token is a stop token, or the last that it may say."""
        new_tokens = self.new_tokens
        full = len(new_tokens) >= self.request.max_new_tokens
        return full or (bool(new_tokens) and new_tokens[-1] in self.request.stop_tokens)


class Prefix(NamedTuple):
    """Tokens from the beginning to the end of a block: a number, never given twice, and the block
    that holds the last of them."""

    number: int
    block: int


class PerRequest(dict[int, int]):
    """A number for each request, by the request's number."""


@dataclass
class Step:
    """What one step of an engine did; requests by number."""

    fed: PerRequest = field(default_factory=PerRequest)  # tokens that were run
    shared: PerRequest = field(default_factory=PerRequest)  # tokens found in shared blocks
    tokens: PerRequest = field(default_factory=PerRequest)  # the new token
    finished: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)  # no next token could be chosen
    put_back: list[int] = field(default_factory=list)  # lost their blocks, and wait again
    passes: int = 0  # of the model: one for each group of prompts, one for the rows that write
    places: int = 0  # rows times columns of these passes, padding included
    blocks: int = 0  # of the pool, in use at the end
