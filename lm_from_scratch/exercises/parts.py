"""A model whose parts can be replaced by a student's functions, one exercise after the other.

A :class:`Machine` is a model and what it needs to write and to learn: a cache, a way to cut the
tail of a distribution, a loss, an optimizer, a learning rate. Each is an attribute, and a
:class:`Part` puts what a student wrote in its place. What a machine does with them is in
``loops``.

A part is in the folder of its exercise, ``catalogue/NAME/part.py``.
"""

import importlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm_from_scratch.attention.visibility import Visibility
from lm_from_scratch.cache.codec import EXACT, Codec
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.exercises import catalogue
from lm_from_scratch.exercises.card import has_part
from lm_from_scratch.exercises.exercise import exercise
from lm_from_scratch.models.qwen2 import Attention, Qwen2ForCausalLM
from lm_from_scratch.optim.adamw import adamw
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.training.loss import causal_lm_loss

#: The model that writes; and the one whose tokenizer, a token for each character, a new one learns.
WRITES, LEARNS = "qwen2-docs", "tasks"


@dataclass
class Machine:
    """A model at work. What a part replaces:

    * ``attends``: of each block (q, k, v, mask) -> values; q is (B, H, T, D), k, v (B, Hkv, S, D)
    * ``mask``: what hides keys, (B, 1, T, S), from a ``Visibility``
    * ``cache``: number of layers -> a new, empty one; ``codec`` is how it keeps numbers
    * ``cut``: logits (B, V) -> logits (B, V) without their tail
    * ``place``: attention mask (B, T) -> positions (B, T), and the next ones (B,)
    * ``choose``: (scores, log-probabilities, stop) -> a step of beam search, as in its exercise
    * ``accept``: (p, q, draft, u) -> how many drafts are kept, and the next token: see its exercise
    * ``spell``: a text -> the tokens to learn from
    * ``loss``: (logits (B, T, V), targets (B, T)) -> a number
    * ``update``: (parameter, state, step, lr): one step of the optimizer, with what it keeps
    * ``rate``: (step, steps) -> the learning rate
    """

    model: Qwen2ForCausalLM
    tokenizer: Tokenizer
    codec: Codec = EXACT
    attends: list[Callable[..., Tensor]] = field(init=False)
    mask: Callable[[Visibility], Tensor] = lambda visibility: visibility.mask
    cut: Callable[[Tensor], Tensor] = lambda logits: logits
    loss: Callable[[Tensor, Tensor], Tensor] = causal_lm_loss
    rate: Callable[[int, int], float] = lambda step, steps: 3e-3

    def __post_init__(self) -> None:
        self.attends = [partial(F.scaled_dot_product_attention, enable_gqa=True)] * self.layers
        self.cache: Callable[[int], Any] = lambda layers: GrowingCache(layers, self.codec)
        self.place: Callable[..., Any] = exercise("left_padding").reference
        self.choose: Callable[..., Any] = exercise("beam_step").reference
        self.accept: Callable[..., Any] = exercise("speculative").reference
        self.spell: Callable[[str], list[int]] = self.tokenizer.encode
        self.update: Callable[[Any, dict[str, Any], int, float], None] = adamw_update
        for block, attention in enumerate(self.every(Attention)):
            attention.attend = partial(self._attend, block)

    def _attend(
        self, block: int, q: Tensor, k: Tensor, v: Tensor, see: Visibility, dropout: float
    ) -> Tensor:
        return self.attends[block](q, k, v, self.mask(see))

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return self.model.config.n_layer

    def every(self, kind: type[nn.Module]) -> list[Any]:
        """The modules of a kind, in order."""
        return [module for module in self.model.modules() if isinstance(module, kind)]


def adamw_update(p: Tensor, state: dict[str, Any], step: int, lr: float, own: Any = adamw) -> None:
    """One step of AdamW, or of a student's function in its place."""
    if not state:
        state.update(mean=torch.zeros_like(p), square=torch.zeros_like(p))
    assert p.grad is not None
    new, state["mean"], state["square"] = own(
        p.detach(), p.grad, state["mean"], state["square"], step, lr
    )
    p.data.copy_(new)


@dataclass(frozen=True)
class Part:
    """Where the answer to an exercise goes.

    * ``place``: what it is in the model, as "every norm"
    * ``put``: (machine, the student's function)
    * ``loop``: where it shows: a name of ``loops.LOOPS``
    * ``rounds``: whether the model then says something else, because numbers are rounded
    * ``apart``: other loops in which it has no use, or cannot be: without gradients nothing learns
    """

    place: str
    put: Callable[[Machine, Any], None]
    loop: str = "write"
    rounds: bool = False
    apart: Collection[str] = ()

    def joins(self, loop: str) -> bool:
        """Whether it is at work in a loop. Parts of the model that writes are in every other loop
        too. One that rounds is not: a last digit may change what it rounds to."""
        return loop == self.loop or (
            self.loop == "write" and not self.rounds and loop not in self.apart
        )


def part(name: str) -> Part | None:
    """Where the answer to an exercise goes; None if it has no place in a model."""
    if not has_part(name):
        return None
    piece: Part = importlib.import_module(f"{catalogue.__name__}.{name}.part").PART
    return piece


def trained() -> Machine:
    """The shipped model, which writes."""
    model, tokenizer = load_shipped(WRITES)
    assert isinstance(model, Qwen2ForCausalLM)
    return Machine(model.float().eval(), tokenizer)


def untrained() -> Machine:
    """A small new model, which learns: 2 blocks of width 64. In float64, since each step makes what
    rounding changed larger: two right functions should not part after 40 steps."""
    model, tokenizer = load_shipped(LEARNS)
    assert isinstance(model, Qwen2ForCausalLM)
    sizes: dict[str, Any] = dict(
        n_layer=2, n_embd=64, n_head=4, n_kv_head=2, head_dim=16, intermediate_size=128
    )
    torch.manual_seed(0)
    return Machine(Qwen2ForCausalLM(replace(model.config, **sizes)).double(), tokenizer)
