"""What a checkpoint does to a quantised weight: class, dtype and memory, in every combination."""

import warnings
from typing import Any

import torch
from torch import Generator, Tensor, nn

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal
from lm_from_scratch.weights.int8 import Int8Weight
from lm_from_scratch.weights.swap import swap_on_conversion

HALF, SINGLE = torch.bfloat16, torch.float32


# -------------------------------------------------------------------------------- how it is used


def weight(kind: Any, matrix: Tensor, coded: bool) -> Tensor:
    """The matrix as it is, or as a weight of the class."""
    made: Tensor = kind.quantize(matrix) if coded else matrix.clone()
    return made


def module_with(contents: Tensor) -> nn.Linear:
    layer = nn.Linear(contents.shape[1], contents.shape[0], bias=False)
    layer.weight = nn.Parameter(contents, requires_grad=not hasattr(contents, "codes"))
    return layer


def held(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold the numbers."""
    names = ("codes", "scale") if hasattr(tensor, "codes") else ("data",)
    return [getattr(tensor, name) for name in names]


def memory(tensor: Tensor) -> set[int]:
    return {part.untyped_storage().data_ptr() for part in held(tensor)}


def fill(layer: nn.Module, state: dict[str, Tensor], assign: bool) -> list[str]:
    """Load with the swap flag on; the warnings. An error of `load` is raised as it is."""
    with swap_on_conversion(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            layer.load_state_dict(state, assign=assign)
        except RuntimeError:
            for name, parameter in layer.named_parameters():
                new = parameter.module_load(state[name], assign=assign)
                if new is parameter or new is state[name]:
                    text = "load returned param or other itself, where a new object is wanted"
                    raise RuntimeError(text) from None
                if not isinstance(new, Tensor):
                    text = f"load returned {new!r}: is there a return statement?"
                    raise RuntimeError(text) from None
            raise
    return [str(warning.message).partition(",")[0] for warning in caught]


def report(layer: nn.Linear, shared: set[int], caught: list[str]) -> dict[str, Any]:
    """What a module holds after it was loaded."""
    now = layer.weight
    coded = hasattr(now, "codes")
    results = {
        "the module's weight": "an Int8Tensor" if coded else "a plain tensor",
        "its dtype": str(now.dtype),
        "its values": (now.dequantize() if coded else now.detach()).float(),
        "the warnings": caught,
    }
    for name, part in zip(("codes", "scale") if coded else ("numbers",), held(now), strict=True):
        own = part.untyped_storage().data_ptr() not in shared
        if shared:
            results[f"the memory of its {name}"] = "its own" if own else "the checkpoint's"
    results["its codes"] = held(now)[0] if coded else "none"
    results["the dtype of its scale"] = str(held(now)[1].dtype) if coded else "none"
    return results


def loading(module: bool, checkpoint: bool, assign: bool, parameter: bool = False) -> Any:
    """A use: load a matrix into a module that holds another; True stands for an Int8Tensor."""

    def use(kind: Any, *, in_module: Tensor, in_checkpoint: Tensor) -> dict[str, Any]:
        layer = module_with(weight(kind, in_module, module))
        other = weight(kind, in_checkpoint, checkpoint)
        if checkpoint:
            held(other)[0].floor_divide_(2)  # no row reaches 127: to round again gives other codes
        if parameter:
            other = nn.Parameter(other, requires_grad=not checkpoint)
        before = [part.detach().clone() for part in held(other)]
        shared = memory(other)
        caught = fill(layer, {"weight": other}, assign)
        results = report(layer, shared, caught)
        kept = all(torch.equal(a, b) for a, b in zip(held(other), before, strict=True))
        return {**results, "the checkpoint is as it was": kept}

    return use


def parameters(kind: Any, **given: Tensor) -> dict[str, Any]:
    """A plain matrix, and one in codes, each as an nn.Parameter."""
    results: dict[str, Any] = {}
    for title, coded in (("plain", False), ("coded", True)):
        report = loading(True, coded, False, parameter=True)(kind, **given)
        results |= {f"{title}: {name}": value for name, value in report.items()}
    return results


def round_trip(kind: Any, *, in_module: Tensor) -> dict[str, Any]:
    """Two tied modules load their own state; an optimizer holds the weight."""
    results: dict[str, Any] = {}
    for assign in (False, True):
        first = module_with(kind.quantize(in_module))
        both = nn.Sequential(first, nn.Linear(1, 1, bias=False))
        both[1].weight = first.weight
        optimizer = torch.optim.SGD(both.parameters(), lr=1.0)
        caught = fill(both, dict(both.state_dict()), assign)
        results |= {f"assign={assign}: {k}": v for k, v in report(first, set(), caught).items()}
        results[f"assign={assign}: the modules are tied"] = both[1].weight is first.weight
        known = optimizer.param_groups[0]["params"][0]
        results[f"assign={assign}: the optimizer holds the weight"] = known is first.weight
    return results


# ------------------------------------------------------------------------------------- arguments


def two(g: Generator, module: torch.dtype, checkpoint: torch.dtype) -> Call:
    return call(
        in_module=normal(g, 6, 45, dtype=module), in_checkpoint=normal(g, 6, 45).to(checkpoint)
    )


def half_single(g: Generator) -> Call:
    return two(g, HALF, SINGLE)


def single_half(g: Generator) -> Call:
    return two(g, SINGLE, HALF)


def own(g: Generator) -> Call:
    return call(in_module=normal(g, 4, 9, dtype=HALF))


BODY = """\
        if isinstance(other, Int8Tensor):
            if assign:
                return other.detach()
            if not isinstance(param, Int8Tensor):
                return other.dequantize().to(param.dtype)
            scale = other.scale.to(param.dtype, copy=True)
            return Int8Tensor(other.codes.clone(), scale)
        matrix = other if assign else other.to(param.dtype)
        return Int8Tensor.quantize(matrix)
"""


# ------------------------------------------------------------------------------- wrong answers

CARELESS = """\
        if isinstance(other, Int8Tensor):
            return other.detach()
        return Int8Tensor.quantize(other)
"""

ASSERTING = """\
        assert type(other) is Tensor
        return Int8Tensor.quantize(other if assign else other.to(param.dtype))
"""

TORCHS = """\
        if assign:
            return other.detach()
        plain = other.dequantize() if isinstance(other, Int8Tensor) else other
        if not isinstance(param, Int8Tensor):
            return plain.to(param.dtype)
        return Int8Tensor.quantize(plain.to(param.dtype))
"""

FIRST = "if isinstance(other, Int8Tensor):\n            if assign:"
COPY = "return Int8Tensor(other.codes.clone(), scale)"
DECODED = "return other.dequantize().to(param.dtype)"
SCALE = "scale = other.scale.to(param.dtype, copy=True)"
MATRIX = "matrix = other if assign else other.to(param.dtype)"

SAME = "one dtype on both sides, assign=False"
QUANTIZED, COPIED = "int8 from a plain checkpoint, assign=False", "int8 from int8, assign=False"
QUANTIZED_ASSIGN = "int8 from a plain checkpoint, assign=True"
COPIED_ASSIGN, CHECKPOINT = "int8 from int8, assign=True", "a checkpoint of parameters"
TO_PLAIN = "plain from int8, assign=False"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the module's dtype without a copy: .to(dtype) may be the same tensor",
     {", copy=True": ""}, SAME),
    ("assign is never asked for: whatever comes is wrapped", {BODY: CARELESS}, QUANTIZED),
    ("only a plain tensor is known", {BODY: ASSERTING}, COPIED),
    ("assign=True takes a plain matrix as it is, and the module is no longer quantised",
     {BODY: f"        if assign:\n            return other.detach()\n{BODY}"}, QUANTIZED_ASSIGN),
    ("codes are decoded and rounded a second time",
     {COPY: "return Int8Tensor.quantize(other.dequantize().to(param.dtype))"}, COPIED),
    ("as torch does it with plain tensors: decoded, and quantised again", {BODY: TORCHS}, COPIED),
    ("the codes are shared", {".codes.clone()": ".codes"}, COPIED),
    ("the scale is made float32 on its way, which copies nothing if it is",
     {SCALE: "scale = other.scale.float().to(param.dtype)"},
     SAME, "in float32 it is .to(dtype) without a copy"),
    ("assign=True shares the codes and copies the scale",
     {"return other.detach()": "return Int8Tensor(other.codes, other.scale.clone())"},
     COPIED_ASSIGN),
    ("a Parameter is taken as it is, whatever assign says",
     {"            if assign:\n":
      "            if assign or isinstance(other, torch.nn.Parameter):\n"}, CHECKPOINT),
    ("the scale keeps the checkpoint's dtype", {SCALE: "scale = other.scale.clone()"}, COPIED),
    ("the checkpoint's dtype without assign",
     {SCALE: "scale = other.scale.clone()", MATRIX: "matrix = other"}, QUANTIZED),
    ("quantised first, and converted then",
     {MATRIX: "matrix = other",
      "return Int8Tensor.quantize(matrix)": "made = Int8Tensor.quantize(matrix)\n"
      "        kind = made.dtype if assign else param.dtype\n"
      "        return Int8Tensor(made.codes, made.scale.to(kind))"}, QUANTIZED),
    ("the module's dtype even with assign",
     {FIRST: "if isinstance(other, Int8Tensor):\n            if assign:\n"
      "                return Int8Tensor(other.codes, other.scale.to(param.dtype))\n"
      "            if assign:", MATRIX: "matrix = other.to(param.dtype)"}, QUANTIZED_ASSIGN),
    ("int8 into int8 is a copy in the module's dtype, whatever assign says",
     {FIRST: "if isinstance(other, Int8Tensor):\n"
      "            if assign and not isinstance(param, Int8Tensor):"}, COPIED_ASSIGN),
    ("assign is not used: all is as with assign=False",
     {"            if assign:\n": "            if False:\n",
      MATRIX: "matrix = other.to(param.dtype)"}, QUANTIZED_ASSIGN),
    ("assign turned round", {BODY: f"        assign = not assign\n{BODY}"}, QUANTIZED),
    ("assign=True makes a copy",
     {"return other.detach()": "return Int8Tensor(other.codes.clone(), other.scale.clone())"},
     COPIED_ASSIGN),
    ("a plain module becomes quantised without assign", {DECODED: "pass"}, TO_PLAIN),
    ("a plain module stays plain with assign",
     {"return other.detach()":
          "return other.detach() if isinstance(param, Int8Tensor) else other.dequantize()"},
     "plain from int8, assign=True"),
    ("a plain module gets the codes without the scale",
     {DECODED: "return other.codes.to(param.dtype)"}, TO_PLAIN),
    ("a plain module gets the checkpoint's dtype without assign",
     {DECODED: "return other.dequantize()"}, TO_PLAIN),
    ("the checkpoint's codes with the module's scale", {SCALE: "scale = param.scale"}, COPIED),
    ("the checkpoint's own object is returned",
     {"return other.detach()": "return other"}, COPIED_ASSIGN),
    ("the module's own object is returned",
     {COPY: "param.codes, param.scale = other.codes.clone(), scale\n            return param"},
     COPIED),
    ("torch.tensor of a tensor, which warns",
     {"other.codes.clone()": "torch.tensor(other.codes)"}, COPIED),
    ("one exact type, which a Parameter is not",
     {MATRIX: "if type(other) is not Tensor:\n"
      "            raise TypeError(type(other))\n"
      f"        {MATRIX}"}, CHECKPOINT),
]  # fmt: skip

CASES = (
    Case(QUANTIZED, half_single,
         "the module's dtype stays: convert the matrix to param.dtype, then quantise it",
         teaching="the row of the table that is met first", use=loading(True, False, False)),
    Case(QUANTIZED_ASSIGN, half_single,
         "the checkpoint's dtype counts, and the class stays: quantise the matrix as it comes",
         use=loading(True, False, True)),
    Case(COPIED, half_single, "the codes are copied as they are, the scale gets the module's dtype",
         teaching="values and dtypes, where no memory can be shared by a conversion", points=2,
         use=loading(True, True, False)),
    Case(COPIED_ASSIGN, half_single,
         "the checkpoint's own tensors, in a new object", points=2, use=loading(True, True, True)),
    Case(TO_PLAIN, single_half,
         "a plain module takes the matrix that the codes stand for, in its own dtype",
         use=loading(False, True, False)),
    Case("plain from int8, assign=True", single_half,
         "the class of the checkpoint comes with its dtype and its memory",
         use=loading(False, True, True)),
    Case(SAME, lambda g: two(g, SINGLE, SINGLE),
         "where nothing is to be converted, .to(dtype) gives the same tensor back, and no copy",
         points=2, use=loading(True, True, False)),
    Case(CHECKPOINT, half_single, "ask with isinstance, not for one exact type", use=parameters),
    Case("its own state, tied and held by an optimizer", own,
         "the state dict of the module holds detached tensors of your own class", use=round_trip,
         teaching="a module that cannot load what it has saved is how this was found"),
)  # fmt: skip

EXERCISE = Exercise(
    name="module_load", function="Int8Tensor", page="8_quantized_weights/5_loading", minutes=30,
    difficulty=3,
    outcome="Write the handler that load_state_dict calls for a tensor subclass so that class, "
            "dtype and memory are right in every combination.",
    reference=Int8Weight, after=("int8_weight",), cases=CASES, wrong=planted(WRONG),
    hints=(
        "Read the table row by row: three pairs of classes, two values of `assign`. In which of "
        "the six is nothing copied at all?",
        "With `assign=True` an `Int8Tensor` of the checkpoint is `other.detach()`, whatever the "
        "module has. Without, a plain module gets `other.dequantize()` in its own dtype.",
        "Four cases: the other is quantised or plain, with `assign` or without. For each, ask "
        "whose dtype the result has, and whether a later change of the checkpoint may reach "
        "it.",
    ),
)  # fmt: skip
