"""Answers to module_load: other right ones, and wrong ones of a second person."""

from lm_from_scratch.exercises.catalogue.module_load.checks import BODY

FILLED = """\
        if assign and isinstance(other, Coded):
            return Int8Tensor(other.codes, other.scale)
        if not isinstance(param, Coded):
            return torch.empty_like(param).copy_(other.dequantize())
        if assign:
            return Int8Tensor.quantize(other)
        if not isinstance(other, Coded):
            other = Int8Tensor.quantize(other.to(param.dtype))
        codes, scale = torch.empty_like(param.codes), torch.empty_like(param.scale)
        return Int8Tensor(codes.copy_(other.codes), scale.copy_(other.scale))
"""

IN_PLACE = """\
        if assign:
            return other.detach() if isinstance(other, Coded) else Int8Tensor.quantize(other)
        if not isinstance(param, Coded):
            param.data.copy_(other.dequantize())
            return param.detach()
        if not isinstance(other, Coded):
            other = Int8Tensor.quantize(other.data.to(param.dtype))
        for mine, theirs in ((param.codes, other.codes), (param.scale, other.scale)):
            mine.copy_(theirs)
        return param.detach()
"""

TABLE = """\
        into, out = isinstance(param, Int8Tensor), isinstance(other, Int8Tensor)
        kind = type(param) if into else type(other)
        rows = {
            (True, False, False): lambda: kind.quantize(other.type(param.dtype)),
            (True, False, True): lambda: kind.quantize(other.detach()),
            (True, True, False): lambda: kind(other.codes + 0, (1 * other.scale).to(param.dtype)),
            (True, True, True): lambda: kind(other.codes, other.scale),
            (False, True, False): lambda: (other.codes * other.scale).to(param.dtype),
            (False, True, True): lambda: kind(other.codes, other.scale),
        }
        return rows[into, out, assign]()
"""

DEEP = """\
        import copy

        dtype = other.dtype if assign else param.dtype
        if isinstance(other, Int8Tensor) and assign:
            return other.detach()
        if isinstance(other, Int8Tensor):
            other = Int8Tensor(copy.deepcopy(other.codes), other.scale.clone())
        else:
            other = type(param).quantize(other.clone().to(dtype))
        if isinstance(param, Int8Tensor):
            return Int8Tensor(other.codes, other.scale.to(dtype))
        return other.dequantize().to(dtype)
"""

RIGHT = [
    # new tensors, filled by copy_
    {BODY: FILLED},
    # the module's own memory, filled in place
    {BODY: IN_PLACE},
    # a table of functions
    {BODY: TABLE},
    # a copy first, the classes afterwards
    {BODY: DEEP},
]  # fmt: skip

LOAD = "def load(param: Tensor, other: Tensor, assign: bool) -> Tensor:"


def then(*lines):
    """The solution by another name, and what is done with its result."""
    own = "\n        ".join(["new = Int8Tensor.loaded(param, other, assign)", *lines])
    head = LOAD.replace("load", "loaded", 1)
    return {LOAD: f"{LOAD}\n        {own}\n\n    @staticmethod\n    {head}"}


WRONG = [
    ("the module's own tensor is filled and returned",
     then("if assign or not isinstance(param, Coded):", "    return new",
          "param.codes.copy_(new.codes)", "param.scale.copy_(new.scale)", "return param")),
    ("the module's own tensor gets other parts",
     then("if isinstance(param, Coded):", "    param.codes, param.scale = new.codes, new.scale",
          "    return param", "return new")),
    ("the module's dtype even with assign", {"other if assign else other.to(": "other.to("},
     "the table's fails more cases"),
    ("codes are decoded and rounded a second time",
     {"if isinstance(other, Int8Tensor):": "if isinstance(param, Int8Tensor):\n"
      "            matrix = other.dequantize() if isinstance(other, Coded) else other\n"
      "            return Int8Tensor.quantize(matrix if assign else matrix.to(param.dtype))\n"
      "        if isinstance(other, Int8Tensor):"}),
    ("all scales are 1",
     {"return Int8Tensor.quantize(matrix)": "return Int8Tensor(matrix.to(torch.int8), "
      "torch.ones(len(matrix), 1, dtype=matrix.dtype))"}),
]  # fmt: skip
