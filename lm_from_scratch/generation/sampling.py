r"""From logits to the next token.

A model gives a score for every token. Sampling bends the scores, cuts the tail off, and draws. Each
step is a pure function of logits (B, V); :class:`Sampler` applies them in the order that has become
the custom: repetition penalty, temperature, top-k, top-p, min-p, typical.

Sources: Keskar et al., *CTRL*, 2019, arXiv:1909.05858 (repetition penalty); Fan, Lewis, Dauphin,
*Hierarchical Neural Story Generation*, 2018, arXiv:1805.04833 (top-k); Holtzman et al., *The
Curious Case of Neural Text Degeneration*, 2020, arXiv:1904.09751 (top-p); Nguyen et al., *Turning
Up the Heat: Min-p Sampling*, 2024, arXiv:2407.01082; Meister et al., *Locally Typical Sampling*,
2023, arXiv:2202.00666.
"""

import math
from dataclasses import dataclass
from numbers import Integral, Rational, Real
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lm_from_scratch.limits import Limit, check

#: The likeliest tokens, which most often have the mass that top-p asks for.
HEAD = 1024
#: So many tokens of each row are added up at a time: their numbers stay in a processor's cache.
BLOCK = 16384


def apply_repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make the tokens marked in ``seen`` (B, V) less likely by a factor on their logits.

    A positive logit is divided, a negative one multiplied: dividing both would make an unlikely
    token *more* likely.
    """
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, penalised, logits)


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divide the logits: below 1 the distribution sharpens, above 1 it flattens."""
    return logits / temperature


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the ``k`` largest logits of each row (and any equal to the smallest of these)."""
    k = min(k, logits.shape[-1])
    smallest = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < smallest, -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose probability reaches ``p``.

    A token stays while the mass *before* it is below ``p``, so the most likely one always stays.
    """
    probabilities = logits.float().softmax(dim=-1)
    removed, enough = beyond(logits, probabilities, p, HEAD)
    if logits.shape[-1] > HEAD and not enough.all():
        rows = ~enough  # alone: sorting all tokens takes twenty times as long
        removed[rows], _ = beyond(logits[rows], probabilities[rows], p, logits.shape[-1])
    return logits.masked_fill(removed, -math.inf)


def beyond(logits: Tensor, probabilities: Tensor, p: float, k: int) -> tuple[Tensor, Tensor]:
    """Which tokens are not among the likeliest ones with mass ``p``, of the first ``k``, for
    ``logits`` and ``probabilities`` (..., V); and whether these have that mass, (...)."""
    order = logits.topk(min(k, logits.shape[-1]), dim=-1).indices
    ordered = probabilities.gather(-1, order)
    before = ordered.cumsum(dim=-1) - ordered
    removed = torch.ones_like(logits, dtype=torch.bool).scatter(-1, order, before >= p)
    return removed, before[..., -1] >= p


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Keep the tokens that are at least ``p`` times as likely as the most likely one.

    Where the model is sure few tokens stay, where it is not many do.
    """
    largest = logits.max(dim=-1, keepdim=True).values
    return logits.masked_fill(logits < largest + math.log(p), -math.inf)


def keep_typical(logits: Tensor, p: float) -> Tensor:
    r"""Keep the tokens whose surprise :math:`-\log p` is nearest to its mean, the entropy.

    As many as it takes for their probability to reach ``p``. Very likely tokens may go, too.
    """
    surprise = -logits.float().log_softmax(dim=-1)
    probability = (-surprise).exp()
    entropy = (probability * surprise).nansum(dim=-1, keepdim=True)  # 0 * inf counts as 0
    order = (surprise - entropy).abs().argsort(dim=-1, stable=True)
    ordered = probability.gather(-1, order)
    before = ordered.cumsum(dim=-1) - ordered
    removed = torch.empty_like(logits, dtype=torch.bool).scatter(-1, order, before >= p)
    return logits.masked_fill(removed, -math.inf)


def check_logits(logits: Tensor) -> Tensor:
    """The largest (B,) of each row of ``logits`` (B, V). Raises ``ValueError`` where it is not
    finite: the row has no likeliest token and no softmax."""
    largest = logits.amax(dim=-1)
    if not largest.isfinite().all():
        row = int((~largest.isfinite()).nonzero()[0, 0])
        raise ValueError(
            f"the largest logit of row {row} is {largest[row].item()}: no token can be chosen. The "
            "model gives NaN or infinity, or the temperature or penalty is too extreme"
        )
    return largest


def draw(logits: Tensor, u: Tensor) -> Tensor:
    """One token id per row of ``logits`` (B, V), from one number ``u`` (B,) in [0, 1) per row.

    The probabilities are laid end to end on the line from 0 to 1; the token is the one whose piece
    ``u`` falls into. One number per row lets every row have a source of randomness of its own.

    A large vocabulary is laid out in blocks: first the block is found, then the token in it. (The
    line is as long as the sum of the weights, which spares dividing each of them.)
    """
    largest, V = check_logits(logits)[:, None], logits.shape[-1]
    wide = torch.float32 if logits.device.type == "mps" else torch.float64  # mps has no float64

    def weights(logits: Tensor) -> Tensor:
        return (logits.to(wide) - largest).exp_()

    if V <= BLOCK:  # its weights are needed once
        inside = weights(logits)
        point = u.to(inside)[:, None] * inside.sum(dim=-1, keepdim=True)
        return piece_of(inside.cumsum(dim=-1), point)[:, 0]
    sums = [weights(block).sum(dim=-1) for block in logits.split(BLOCK, dim=-1)]
    line = torch.stack(sums, dim=-1).cumsum(dim=-1)  # the ends of the blocks, (B, V / BLOCK)
    point = u.to(line)[:, None] * line[:, -1:]
    block = piece_of(line, point)  # (B, 1)
    point = point - F.pad(line, (1, 0)).gather(1, block)  # from the beginning of the block on
    ids = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    inside = weights(logits.gather(1, ids.clamp(max=V - 1))).masked_fill_(ids >= V, 0.0)
    return ids.gather(1, piece_of(inside.cumsum(dim=-1), point))[:, 0]


def piece_of(line: Tensor, point: Tensor) -> Tensor:
    """Which piece of each ``line`` (B, N), given by the ends of its pieces, a ``point`` (B, 1)
    falls into; one beyond the line, by rounding, into the last piece that has a length."""
    last = torch.searchsorted(line, line[:, -1:].contiguous())
    return torch.searchsorted(line, point, right=True).minimum(last)


def is_number(x: Any) -> bool:
    """Whether ``x`` is a finite number, of Python or of NumPy; True and False are none."""
    if isinstance(x, bool):
        return False
    if isinstance(x, Integral):
        return abs(int(x)) < 2**63
    return isinstance(x, Real) and not isinstance(x, Rational) and math.isfinite(x)


#: A finite number of any kind, which another limit may follow.
Number = Annotated[float, Limit("must be a finite number", is_number)]
_FROM_GREEDY = Limit("must be 0 (greedy) or more", lambda x: x >= 0)
_FROM_OFF = Limit(
    "must be a whole number, 0 (off) or more",
    lambda k: isinstance(k, Integral) and is_number(k) and int(k) >= 0,
)
_ABOVE_0 = Limit("must be above 0", lambda x: x > 0)
_TO_OFF = Limit("must be above 0 and at most 1 (off)", lambda p: 0 < p <= 1)
_SHARE = Limit("must be in 0 (off) ... 1", lambda p: 0 <= p <= 1)


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How to choose the next token. The defaults draw from the model's own distribution."""

    temperature: Annotated[Number, _FROM_GREEDY] = 1.0  # 0 is greedy: the likeliest token
    top_k: Annotated[int, _FROM_OFF] = 0  # 0 is off
    top_p: Annotated[Number, _TO_OFF] = 1.0  # 1 is off
    min_p: Annotated[Number, _SHARE] = 0.0  # 0 is off
    typical_p: Annotated[Number, _TO_OFF] = 1.0  # 1 is off
    repetition_penalty: Annotated[Number, _ABOVE_0] = 1.0  # 1 is off

    def __post_init__(self) -> None:
        check(self)

    def logits(self, logits: Tensor, seen: Tensor) -> Tensor:
        """The bent and cut ``logits`` (B, V), where ``seen`` (B, V) marks the tokens in the row so
        far; -inf where a token cannot be drawn."""
        if self.repetition_penalty != 1.0:
            logits = apply_repetition_penalty(logits, seen, self.repetition_penalty)
        if self.temperature not in (0.0, 1.0):
            logits = apply_temperature(logits, self.temperature)
        if self.top_k:
            logits = keep_top_k(logits, self.top_k)
        if self.top_p < 1.0:
            logits = keep_top_p(logits, self.top_p)
        if self.min_p > 0.0:
            logits = keep_min_p(logits, self.min_p)
        if self.typical_p < 1.0:
            logits = keep_typical(logits, self.typical_p)
        return logits

    def __call__(self, logits: Tensor, seen: Tensor, u: Tensor) -> Tensor:
        """The next token (B,) of each row. ``seen`` (B, V) marks the tokens in the row so far."""
        logits = self.logits(logits, seen)
        if self.temperature == 0.0:
            check_logits(logits)
            return logits.argmax(dim=-1)
        return draw(logits, u)


GREEDY = Sampler(temperature=0.0)
