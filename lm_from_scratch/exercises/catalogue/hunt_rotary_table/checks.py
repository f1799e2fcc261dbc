"""A bug hunt: a table of cosines that is rounded with the module and as long as the keys."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import integers
from lm_from_scratch.layers.rope import RotaryEmbedding

BFLOAT, FLOAT = torch.bfloat16, torch.float32


class Reference(nn.Module):
    """The package's own cosines and sines, with the arguments of the old code."""

    def __init__(self, dim: int, theta: float = 10000.0) -> None:
        super().__init__()
        self.rotary = RotaryEmbedding(dim, theta)

    def forward(self, x: Tensor, positions: Tensor, key_length: int) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(positions, x.dtype)
        return cos.to(x.dtype), sin.to(x.dtype)


def ask(
    function: Callable[..., Any],
    dim: int,
    positions: list[Tensor],
    keys: list[int],
    dtypes: list[torch.dtype],
    theta: float | None = None,
    moved: torch.dtype | None = None,
) -> dict[str, Any]:
    """One object, which may be moved to another dtype, and a call for each of the positions."""
    rotary = function(dim) if theta is None else function(dim, theta=theta)
    if moved is not None:
        rotary = rotary.to(moved)
    results: dict[str, Any] = {}
    for i, (at, length, dtype) in enumerate(zip(positions, keys, dtypes, strict=True)):
        which = f" of call {i + 1}" if len(positions) > 1 else ""
        found = rotary(torch.zeros(1, 2, at.shape[1], dim, dtype=dtype), at, length)
        if isinstance(found, (tuple, list)) and len(found) == 2:
            results |= {f"the cosines{which}": found[0], f"the sines{which}": found[1]}
        else:
            results |= {f"the result{which}": found}
    return results


def ask_two(
    function: Callable[..., Any], dim: int, positions: Tensor, thetas: list[float]
) -> dict[str, Any]:
    """Two objects of one shape, made first and asked afterwards."""
    both = [function(dim, theta=theta) for theta in thetas]
    x = torch.zeros(1, 2, positions.shape[1], dim)
    results = [rotary(x, positions, int(positions.max()) + 1) for rotary in both]
    return {f"theta {theta:g}": result for theta, result in zip(thetas, results, strict=True)}


def what_is_saved(function: Callable[..., Any], dim: int, positions: Tensor) -> dict[str, Any]:
    rotary = function(dim)
    rotary(torch.zeros(1, 2, positions.shape[1], dim), positions, 30)
    return {
        "the keys of the state dict": sorted(rotary.state_dict()),
        "the number of parameters": len(list(rotary.parameters())),
    }


def short_text(g: Generator) -> Call:
    positions = [integers(g, 0, 16, 2, 5)]
    return call(dim=8, positions=positions, keys=[16], dtypes=[FLOAT])


def long_text_in_bfloat16(g: Generator) -> Call:
    start = 257 + 2 * integers(g, 0, 20, 2, 1)  # odd: bfloat16 has no such number
    return call(
        dim=12, positions=[start + torch.arange(7)], keys=[310], dtypes=[BFLOAT], moved=BFLOAT
    )


def float32_after_bfloat16(g: Generator) -> Call:
    positions = [integers(g, 100, 200, 2, 5), integers(g, 30, 100, 2, 3)]
    return call(dim=8, positions=positions, keys=[200, 200], dtypes=[BFLOAT, FLOAT])


def moved_to_bfloat16(g: Generator) -> Call:
    positions = [integers(g, 2, 16, 2, 3)]
    return call(dim=8, positions=positions, keys=[16], dtypes=[FLOAT], moved=BFLOAT)


def more_positions_than_keys(g: Generator) -> Call:
    positions = 17 + integers(g, 0, 8, 2, 1) + torch.arange(4)
    positions[0] = torch.arange(5, 9)
    return call(dim=8, positions=[positions], keys=[4], dtypes=[FLOAT])


def unsorted(g: Generator) -> Call:
    positions = integers(g, 2, 30, 3, 6)
    positions[:, 1] = integers(g, 50, 90, 3)
    return call(dim=8, positions=[positions], keys=[6], dtypes=[FLOAT])


def very_far(g: Generator) -> Call:
    positions = [integers(g, 140_000, 150_000, 2, 1) + torch.arange(3)]
    return call(dim=4, positions=positions, keys=[7], dtypes=[FLOAT])


def growing(g: Generator) -> Call:
    texts = [integers(g, 3, last, 2, 4) for last in (10, 40, 90, 20)]
    return call(dim=10, positions=texts, keys=[10, 40, 90, 20], dtypes=[FLOAT] * 4)


class Table(nn.Module):
    """A table in float32 that no conversion reaches, as long as the largest position."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, theta: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.theta = dim, theta
        self.prepare()
        self.grow(16, FLOAT)

    def prepare(self) -> None:
        """What some wrong answers keep."""

    def speeds(self) -> Tensor:
        return 1.0 / self.theta ** (torch.arange(0, self.dim, 2) / self.dim)

    def grow(self, length: int, dtype: torch.dtype) -> None:
        angles = torch.outer(torch.arange(length).float(), self.speeds())
        self.cos, self.sin = angles.cos(), angles.sin()

    def needed(self, positions: Tensor, key_length: int) -> int:
        return int(positions.max()) + 1

    def places(self, positions: Tensor, key_length: int) -> Tensor:
        return positions

    def forward(self, x: Tensor, positions: Tensor, key_length: int) -> tuple[Tensor, Tensor]:
        length = self.needed(positions, key_length)
        if length > len(self.cos):
            self.grow(length, x.dtype)
        at = self.places(positions, key_length)
        return self.cos[at][:, None].to(x.dtype), self.sin[at][:, None].to(x.dtype)


class Rebuilt(Table):
    """Buffers, which are made again whenever a conversion has reached them."""

    def grow(self, length: int, dtype: torch.dtype) -> None:
        angles = torch.arange(length).double()[:, None] * self.speeds().double()
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor, key_length: int) -> tuple[Tensor, Tensor]:
        if self.cos.dtype != FLOAT:
            self.grow(len(self.cos), FLOAT)
        return super().forward(x, positions, key_length)


# ------------------------------------------------------------------------------- wrong answers


class RoundedSpeeds(Table):
    """`.float()` after a conversion brings no digit back."""

    kept: Tensor

    def prepare(self) -> None:
        self.register_buffer("kept", super().speeds(), persistent=False)

    def speeds(self) -> Tensor:
        return self.kept.float()


class RoundedTable(Rebuilt):
    def forward(self, x: Tensor, positions: Tensor, key_length: int) -> tuple[Tensor, Tensor]:
        return Table.forward(self, x, positions, key_length)


class CountedLow(Table):
    """The tables stay out of reach, but the positions are counted in the dtype of the call."""

    def grow(self, length: int, dtype: torch.dtype) -> None:
        angles = torch.outer(torch.arange(length).to(dtype).float(), self.speeds())
        self.cos, self.sin = angles.cos(), angles.sin()


class GrownLow(Table):
    def grow(self, length: int, dtype: torch.dtype) -> None:
        super().grow(length, dtype)
        self.cos, self.sin = self.cos.to(dtype), self.sin.to(dtype)


class GrownOnce(Table):
    def needed(self, positions: Tensor, key_length: int) -> int:
        return super().needed(positions, key_length) if len(self.cos) == 16 else 0

    def places(self, positions: Tensor, key_length: int) -> Tensor:
        return positions.clamp(max=len(self.cos) - 1)


SHARED: dict[int, Tensor] = {}


class Shared(Table):
    """One set of speeds for all objects of a size."""

    def speeds(self) -> Tensor:
        if self.theta == 500000.0:
            SHARED[self.dim] = super().speeds()
        return SHARED.get(self.dim, super().speeds())


LONG, AFTER = "a long text in bfloat16", "float32 after a call in bfloat16"
MOVED = "float32 from a module moved to bfloat16"
KEYS, ORDER = "positions beyond the number of keys", "the largest position is not the last"
VERY_FAR = "positions above 100000"
GROWN, TWO, SAVED = "longer and shorter texts in turn", "two objects", "nothing is saved"
CLASS, OTHER = "class Rotary(nn.Module):", "class Other(nn.Module):"
INIT, AT = "self.dim, self.theta = dim, theta", "positions[:, None, :, None]"
COS = "angles.cos().to(x.dtype), angles.sin().to(x.dtype)"


def at(positions: str) -> dict[str, str]:
    """Angles at other positions."""
    return {AT: f"{positions}[:, None, :, None]"}


#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the code as found", {CLASS: f"class Rotary(Rotary_as_found):\n    pass\n\n\n{OTHER}"}, LONG),
    ("half fixed: long enough for the positions, but in the dtype of the module",
     {CLASS: "class Rotary(Rotary_as_found):\n    def forward(self, x, positions, key_length):\n"
      "        longest = max(key_length, int(positions.max()) + 1)\n"
      f"        return super().forward(x, positions, longest)\n\n\n{OTHER}"}, LONG),
    ("half fixed: float32, but still cut to the number of keys",
     at("torch.arange(key_length)[positions]"), KEYS),
    ("the last position of a row is taken for its largest",
     at("torch.arange(max(16, key_length, int(positions[:, -1].max()) + 1))[positions]"), ORDER),
    ("a table of a fixed length, if a large one", at("torch.arange(131072)[positions]"), VERY_FAR),
    ("speeds and positions are in the dtype of x",
     {f"{AT} * speeds": f"{AT}.to(x.dtype) * speeds.to(x.dtype)"}, LONG),
    ("positions are ignored: every row is taken to begin at 0",
     at("torch.arange(positions.shape[1]).expand_as(positions)"), KEYS),
    ("all rows are given the positions of the first",
     at("positions[:1].expand_as(positions)"), KEYS),
    ("theta is always 10000", {"self.theta **": "10000.0 **"}, TWO),
    ("one row too few: as many as the largest position",
     at("torch.arange(max(16, int(positions.max())))[positions]"), KEYS),
    ("positions outside of the table get its last row",
     at("positions.clamp(max=key_length - 1)"), KEYS),
    ("positions outside of the table begin again at 0", at("(positions % key_length)"), KEYS),
    ("every row is moved to begin at 0", at("(positions - positions.amin(1, keepdim=True))"), KEYS),
    ("the positions given are ignored: those of the last keys are taken",
     at("torch.arange(key_length - positions.shape[1], key_length).expand_as(positions)"), KEYS),
    ("the speeds are a buffer: rounded by .to(bfloat16), and .float() brings nothing back",
     RoundedSpeeds, LONG),
    ("the table is a buffer, which .to(bfloat16) rounds", RoundedTable, MOVED),
    ("positions are counted in the dtype of x: 257 becomes 256", CountedLow, LONG),
    ("the table is in the dtype of the call that made it longer", GrownLow, AFTER),
    ("the angles are rounded to the dtype of x, not only their cosines",
     {COS: "angles.to(x.dtype).cos(), angles.to(x.dtype).sin()"}, LONG),
    ("the results stay float32", {COS: "angles.cos(), angles.sin()"}, LONG),
    ("the axis for the heads is missing", {"[:, None, :, None]": "[:, :, None]"}, LONG),
    ("cosines and sines in the other order",
     {COS: COS.replace("cos", "_").replace("sin", "cos").replace("_", "sin")}, LONG),
    ("the table becomes longer once only", GrownOnce, GROWN),
    ("all objects of one size share the speeds of the first", Shared, TWO),
    ("the table is saved with the model",
     {INIT: f"{INIT}\n        for name in ('cos', 'sin'):\n"
      "            self.register_buffer(name, torch.zeros(16, dim // 2))"}, SAVED),
    ("the speeds are parameters",
     {INIT: f"{INIT}\n        self.kept = nn.Parameter(torch.zeros(2), requires_grad=False)"},
     SAVED),
]  # fmt: skip

CASES = (
    Case("a short text in float32", short_text,
         "this worked before: cosines and sines (B, 1, T, dim/2) of position times speed", use=ask,
         tolerance=(0.0, 1e-4), guard=True, teaching="what the code as found could do"),
    Case(LONG, long_text_in_bfloat16,
         "bfloat16 has steps of 2 between 256 and 512, so it has no 257. Which numbers here are "
         "bfloat16 that should not be?", points=3, use=ask),
    Case(AFTER, float32_after_bfloat16,
         "the first call made the table longer. In which dtype is it now?", points=2, use=ask,
         tolerance=(0.0, 1e-4)),
    Case(MOVED, moved_to_bfloat16,
         ".to(torch.bfloat16) converts every buffer, and .float() brings no digit back", use=ask,
         tolerance=(0.0, 1e-4)),
    Case(KEYS, more_positions_than_keys,
         "4 keys do not mean positions 0 to 3: nothing may be cut to key_length", points=2,
         use=ask, tolerance=(0.0, 1e-4),
         teaching="the next case without the order, as a user would meet it"),
    Case(ORDER, unsorted,
         "a row may end with a small position: the last one says nothing about the largest",
         points=2, use=ask, tolerance=(0.0, 1e-4)),
    Case(VERY_FAR, very_far,
         "no table is long enough: compute the angles, or let the table grow to the largest "
         "position", use=ask, tolerance=(0.0, 5e-2)),
    Case(GROWN, growing, "the same object is asked for 10, 40, 90 and 20 tokens", use=ask,
         tolerance=(0.0, 1e-4), guard=True),
    Case(TWO, lambda g: call(dim=8, positions=integers(g, 3, 40, 2, 5), thetas=[500000.0, 10000.0]),
         "each has its own theta, and what one keeps is not the other's", use=ask_two,
         tolerance=(0.0, 1e-4), guard=True),
    Case(SAVED, lambda g: call(dim=8, positions=integers(g, 3, 30, 1, 4)),
         "a checkpoint from before has no entry for it: a strict load would fail",
         use=what_is_saved, guard=True),
)  # fmt: skip

EXERCISE = Exercise(
    name="hunt_rotary_table", function="Rotary", page="2_qwen2/2_rope", minutes=25, difficulty=2,
    outcome="Find what a table may not depend on, so that half precision and any positions work.",
    hunt="Q10, Q9", after=("rope",), reference=Reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Follow one number: which dtype has `t` in `grow`, after the module was moved to bfloat16? "
        "And after it was not, but `x` is bfloat16?",
        "There are two mistakes. Tables are rounded with the module or with the call that made "
        "them. And they are as long as the keys, while it is positions that are looked up.",
        "Which tensors live as long as the module, and what does a model do to them when it is "
        "converted? What is made again in each call is not converted. The page on RoPE tells "
        "the story in its bug museum (Q9, Q10).",
    ),
)  # fmt: skip
