"""A checkpoint loaded by assignment: who loses the weight, whose memory it is, what stays set."""

from collections import OrderedDict
from typing import Any

import torch
from torch import Generator, Tensor, nn

from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.exercises.inputs import normal
from lm_from_scratch.weights.swap import swap_on_conversion

VOCAB, WIDTH = 7, 4


class Tied(nn.Module):
    """The model of the exercise, filled with numbers that no test is about."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=dtype)
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight

    def forward(self, idx: Tensor) -> Tensor:
        x = self.norm.weight * self.embed(idx) + self.norm.bias
        logits: Tensor = self.head(x.to(self.head.weight.dtype))
        return logits


def load(model: nn.Module, state: dict[str, Tensor]) -> None:
    """The package's flag, for copies in a plain dict."""
    with swap_on_conversion():
        model.load_state_dict({name: x.clone() for name, x in state.items()}, assign=True)


# ------------------------------------------------------------------------------------- arguments


def half_and_single(g: Generator) -> Call:
    """Matrices in bfloat16, the norm in float32; each name in memory of its own."""
    matrix = normal(g, VOCAB, WIDTH, dtype=torch.bfloat16)
    state = {
        "embed.weight": matrix,
        "norm.weight": normal(g, WIDTH) + 1,
        "norm.bias": normal(g, WIDTH),
        "head.weight": matrix.clone(),
    }
    return call(state=state)


# -------------------------------------------------------------------------------- how it is used


def flag() -> bool:
    return bool(torch.__future__.get_swap_module_params_on_conversion())


def attempt(function: Any, model: nn.Module, state: dict[str, Tensor], before: bool = False) -> str:
    """Call with the global flag on or off; whether it raised, and the settings afterwards."""
    dtype, raised = torch.get_default_dtype(), "no error"
    with swap_on_conversion(before):
        try:
            function(model, state)
        except NotImplementedError:
            raise
        except RuntimeError:
            raised = "RuntimeError"
        finally:
            after = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
        return f"{raised}, flag {flag()}, default dtype {after}"


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([[1, 3, 4]])).float().pow(2).mean().backward()
        optimizer.step()


def arrives(function: Any, *, state: dict[str, Tensor]) -> dict[str, Any]:
    model = Tied()
    model.norm.bias.requires_grad_(False)
    with swap_on_conversion(False):
        returned = function(model, state)
    return {
        **{name: p.detach() for name, p in model.state_dict().items()},
        "norm.weight is trained": model.norm.weight.requires_grad,
        "norm.bias, which was frozen, is trained": model.norm.bias.requires_grad,
        "norm.weight is a Parameter": isinstance(model.norm.weight, nn.Parameter),
        "it returns": "nothing" if returned is None else type(returned).__name__,
    }


def refuses(function: Any, *, state: dict[str, Tensor]) -> dict[str, str]:
    missing = {name: x for name, x in state.items() if name != "norm.bias"}
    return {
        "a name is missing": attempt(function, Tied(), missing),
        "a name is unknown": attempt(function, Tied(), {**state, "norm.scale": torch.ones(1)}),
    }


def leaves_settings(function: Any, *, state: dict[str, Tensor]) -> dict[str, str]:
    return {
        "the flag was off": attempt(function, Tied(), state),
        "the flag was on": attempt(function, Tied(), state, True),
    }


def trains(function: Any, *, state: dict[str, Tensor]) -> dict[str, Any]:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    listed = list(model.parameters())
    with swap_on_conversion(False):
        function(model, {name: x.clone() for name, x in state.items()})
    held = {id(p) for p in optimizer.param_groups[0]["params"]}
    stranded = [name for name, p in model.named_parameters() if id(p) not in held]
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer)
    moved = [not torch.equal(p, x) for p, x in zip(model.parameters(), before, strict=True)]
    return {
        "weights that the optimizer does not hold": stranded,
        "a list made before holds the weights": all(
            any(p is x for x in listed) for p in model.parameters()
        ),
        "five steps moved all weights": all(moved),
    }


def stays_tied(function: Any, *, state: dict[str, Tensor]) -> dict[str, Any]:
    model = Tied()
    with swap_on_conversion(False):
        function(model, state)
    return {
        "head and embedding are tied": model.head.weight is model.embed.weight,
        "parameters": len(list(model.parameters())),
    }


def memory(model: nn.Module) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in model.state_dict().values()}


def leaves_checkpoint(function: Any, *, state: dict[str, Tensor]) -> dict[str, Any]:
    first, second = Tied(), Tied()
    theirs = {x.untyped_storage().data_ptr() for x in state.values()}
    with swap_on_conversion(False):
        function(first, state)
        function(second, state)
    results = {
        "a model shares memory with the checkpoint": bool(memory(first) & theirs),
        "two models share memory": bool(memory(first) & memory(second)),
    }
    before = {name: x.clone() for name, x in state.items()}
    train(first, torch.optim.SGD(first.parameters(), lr=0.1))
    same = all(torch.equal(x, before[name]) for name, x in state.items())
    return {**results, "training changed the checkpoint": not same}


def loads_again(function: Any, *, state: dict[str, Tensor]) -> dict[str, Any]:
    """The state dict of a model, as torch gives it, is loaded by another one afterwards."""
    source = Tied()
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            parameter.data = state[name].clone()
    given: OrderedDict[str, Tensor] = source.state_dict()  # type: ignore[assignment]
    later = Tied(torch.float64)
    with swap_on_conversion(False):
        function(Tied(), given)
        notes = sorted({key for note in given._metadata.values() for key in note})  # type: ignore[attr-defined]
        later.load_state_dict(given)
    return {
        "the dtype of a later model, which was float64": str(later.embed.weight.dtype),
        "the later model shares memory with the state dict": bool(memory(later) & memory(source)),
        "what the state dict carries for each module": notes,
    }


BODY = """\
    copies = {name: tensor.clone() for name, tensor in state.items()}
    flag = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(copies, assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(flag)
"""


# ------------------------------------------------------------------------------- wrong answers

COPIES = "copies = {name: tensor.clone() for name, tensor in state.items()}"
AS_FOUND = "    model.load_state_dict(state, assign=True)\n"
RESTORED = "torch.__future__.set_swap_module_params_on_conversion(flag)"
FINALLY = f"""\
    try:
        model.load_state_dict(copies, assign=True)
    finally:
        {RESTORED}
"""

POURED = """\
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.data = state[name].clone()
"""

SWAPPED = """\
    own = dict(model.named_parameters(remove_duplicate=False))
    if own.keys() != state.keys():
        raise RuntimeError("names differ")
    for name, parameter in own.items():
        torch.utils.swap_tensors(parameter, nn.Parameter(state[name].clone()))
"""

ONE_DTYPE = """\
    model.to(next(iter(state.values())).dtype)
    model.load_state_dict(dict(state))
"""

OPTIMIZER = "the optimizer trains the model"
REFUSED = "a wrong name is refused, and nothing stays set"
GLOBAL, TWICE = "global settings are as they were", "another model loads the same state dict"
VALUES = "values, dtypes and what is frozen"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the code as found", {BODY: AS_FOUND}, OPTIMIZER),
    ("a plain dict, still assigned",
     {BODY: "    model.load_state_dict(dict(state), assign=True)\n"}, OPTIMIZER),
    ("copies are assigned: the optimizer is still left behind",
     {BODY: f"    {COPIES}\n    model.load_state_dict(copies, assign=True)\n"}, OPTIMIZER),
    ("assigned and tied again, without the optimizer",
     {BODY: f"    {COPIES}\n    model.load_state_dict(copies, assign=True)\n"
      "    model.head.weight = model.embed.weight\n"}, OPTIMIZER),
    ("the flag stays on when a name is refused",
     {FINALLY: f"    model.load_state_dict(copies, assign=True)\n    {RESTORED}\n"}, REFUSED),
    ("the flag stays on", {FINALLY: "    model.load_state_dict(copies, assign=True)\n"}, GLOBAL),
    ("the flag is off afterwards, even if it was on",
     {"conversion(flag)": "conversion(False)"}, GLOBAL),
    ("a plain dict, but in the memory of the checkpoint",
     {COPIES: "copies = dict(state)"}, "training leaves the checkpoint alone"),
    ("swapped, but the state dict is given as it is", {COPIES: "copies = state"}, TWICE),
    ("a copy of the state dict that shares what it carries",
     {COPIES: "import copy\n\n    copies = copy.copy(state)\n"
      "    copies.update({name: tensor.clone() for name, tensor in state.items()})"}, TWICE),
    ("the model's dtype stays: values are copied",
     {BODY: "    model.load_state_dict(dict(state))\n"}, VALUES),
    ("one dtype for the whole model", {BODY: ONE_DTYPE}, VALUES),
    ("a frozen parameter wants a gradient", {BODY: SWAPPED}, VALUES),
    ("missing and unknown names pass", {"assign=True": "assign=True, strict=False"}, REFUSED),
    ("missing names pass",
     {BODY: "    if unknown := state.keys() - model.state_dict().keys():\n"
      "        raise RuntimeError(unknown)\n"
      + POURED.replace("\n", "\n        if name not in state:\n            continue\n", 1)},
     REFUSED),
    ("unknown names pass",
     {BODY: POURED.replace(
      "    for",
      "    if missing := model.state_dict().keys() - state.keys():\n"
      "        raise RuntimeError(missing)\n    for",
      )}, REFUSED),
    ("the loaded names are returned",
     {"        model.load_state_dict(copies, assign=True)\n":
      "        return model.load_state_dict(copies, assign=True)\n"}, VALUES),
    ("the default dtype of torch stays that of the checkpoint",
     {f"    {COPIES}":
      f"    torch.set_default_dtype(next(iter(state.values())).dtype)\n    {COPIES}"}, GLOBAL),
]  # fmt: skip

CASES = (
    Case(VALUES, half_and_single,
         "every tensor keeps the dtype that it has in the state dict, and a new Parameter wants a "
         "gradient unless you say otherwise", use=arrives, guard=True),
    Case(REFUSED, half_and_single,
         "a missing or an unknown name is a RuntimeError, and what you have set is taken back "
         "then, too", use=refuses, guard=True),
    Case(GLOBAL, half_and_single, "read the flag first, and put back what you have read, not False",
         use=leaves_settings, guard=True),
    Case(OPTIMIZER, half_and_single,
         "compare the id of each weight with those that the optimizer holds, before and after",
         points=3, use=trains),
    Case("the head stays tied", half_and_single,
         "two names, one parameter: it must be the same object afterwards", points=2,
         use=stays_tied,
         teaching="untying the head strands the optimizer, too; here the tie is seen alone"),
    Case("training leaves the checkpoint alone", half_and_single,
         "what is assigned lies in the memory of the state dict", points=3, use=leaves_checkpoint),
    Case(TWICE, half_and_single,
         "a state dict of torch has an attribute _metadata: print it before and after", points=2,
         use=loads_again),
)  # fmt: skip

EXERCISE = Exercise(
    name="hunt_tied_weights", function="load_in_its_dtype",
    page="8_quantized_weights/3_conversions", minutes=30, difficulty=2,
    outcome="Write a loader that takes a checkpoint's dtypes so that the optimizer, the tie and "
            "the checkpoint itself survive.",
    reference=load, hunt="T10, T11", cases=CASES, wrong=planted(WRONG),
    hints=(
        "Compare `id` of the weight, of the head's and of the optimizer's before and after. Which "
        "of the three has changed?",
        "torch can swap the contents of two tensors and leave the objects as they are. "
        "`load_state_dict` does so if a flag of `torch.__future__` is set, for the time of the "
        "call only.",
        "`load_state_dict(assign=True)` takes the memory of what it is given, and notes in "
        "`state._metadata` that it assigned: https://github.com/pytorch/pytorch/issues/188166. "
        "So what should it be given, and what should it not find there?",
    ),
)  # fmt: skip
