# %% [markdown]
# # Who wins when a checkpoint is loaded
#
# With the swap flag on, `load_state_dict` asks a tensor what is to be swapped into the module. It
# calls `Tensor.module_load(param, other, assign)`, where `param` is the module's tensor and `other`
# that of the checkpoint. A class of tensors may answer in its `__torch_function__`. You write this
# answer for weights of 8 bits.
#
# `Coded` below is a small class of such weights, with `codes` (int8) and a `scale` for each row.
# `shape` and `dtype` are those of the matrix that it stands for. torch can do one thing with such a
# weight, `detach()`, which gives a new object over the same memory; all else is a TypeError.
#
# Your class `Int8Tensor` inherits all of this and adds one function, `load`. It is called with
# `param`, `other` and `assign`, and at least one of the two tensors is an `Int8Tensor`.
#
# What holds for `load`:
#
# - It returns a *new* tensor object, neither `param` nor `other`. torch swaps it in.
# - `assign=False`: the module's class and dtype stay, and the checkpoint gives the values. The
#   result shares no memory with the checkpoint, whatever the dtypes.
# - `assign=True`: the checkpoint's dtype counts. An `Int8Tensor` of the checkpoint is taken as it is,
#   with its memory and without a copy. A plain matrix is quantised if the module's weight is.
#
# | module | checkpoint | result with `assign=False` | with `assign=True` |
# |---|---|---|---|
# | `Int8Tensor` | plain | `Int8Tensor`, quantised | `Int8Tensor`, quantised |
# | `Int8Tensor` | `Int8Tensor` | `Int8Tensor`, own memory | `Int8Tensor`, memory shared |
# | plain | `Int8Tensor` | plain, the matrix it stands for | `Int8Tensor`, memory shared |
#
# - From `Int8Tensor` to `Int8Tensor` the codes are copied as they are, and the scale is converted. A
#   plain matrix is converted first and quantised then.
# - Each tensor may also be an `nn.Parameter`, on both sides, and may come from the module's own
#   `state_dict()`. Nothing is written into the checkpoint, and there is no warning.
# - Whatever holds the module's weight, an optimizer or a tied module, goes on holding it.

# %%
import torch
from torch import Tensor


class Coded(Tensor):
    """A matrix (N, K) that is kept as int8 codes, with a scale (N, 1)."""

    codes: Tensor
    scale: Tensor

    def __new__(cls, codes: Tensor, scale: Tensor):
        self = Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=scale.dtype, device=codes.device
        )
        self.codes, self.scale = codes, scale
        return self

    @classmethod
    def quantize(cls, matrix: Tensor):
        """Round a plain matrix to codes; the scale has its dtype."""
        precise = matrix.detach().float()
        largest = precise.abs().amax(dim=1, keepdim=True)
        scale = (largest / 127).to(matrix.dtype)
        return cls((precise / scale).round().to(torch.int8), scale)

    def dequantize(self) -> Tensor:
        """The plain matrix that the codes stand for, in memory of its own."""
        return self.codes * self.scale

    @staticmethod
    def load(param: Tensor, other: Tensor, assign: bool) -> Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is Tensor.module_load:
            function = cls.load
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.detach.default:  # in the same memory
            return cls(args[0].codes, args[0].scale)
        raise TypeError(f"{cls.__name__} does not know {operator}")


# %%
class Int8Tensor(Coded):
    """A weight that says what a checkpoint does to it."""

    @staticmethod
    def load(param: Tensor, other: Tensor, assign: bool) -> Tensor:
        """What is swapped into the module, instead of `param`."""
        ### BEGIN SOLUTION
        if isinstance(other, Int8Tensor):
            if assign:
                return other.detach()
            if not isinstance(param, Int8Tensor):
                return other.dequantize().to(param.dtype)
            scale = other.scale.to(param.dtype, copy=True)
            return Int8Tensor(other.codes.clone(), scale)
        matrix = other if assign else other.to(param.dtype)
        return Int8Tensor.quantize(matrix)
        ### END SOLUTION


# %%
from lm_from_scratch.exercises import check

points = check("module_load", Int8Tensor)
### BEGIN HIDDEN TESTS
points = min(points, check("module_load", Int8Tensor, seed=7341))
### END HIDDEN TESTS
float(points)
