"""RMSNorm and RoPE on a CPU, beside transformers and torch.compile.

Both are bound by memory: the limit is the time of a copy, of a tensor of this size, that reads and
writes as many bytes as the layer cannot do without. Ours is what the models call; compiled, the
formula of the same file.
"""

from collections.abc import Callable, Iterator

import measure
import torch
from measure import Row, Size
from torch import Tensor

from lm_from_scratch.layers.norm import RMSNorm, rms_norm
from lm_from_scratch.layers.rope import apply_rope, inverse_frequencies, rotation

REPEATS = 5  # of one layer in a turn
THEIRS, COMPILED = "transformers", "transformers, compiled"


def rows(size: Size) -> Iterator[Row]:
    B, T, H, D = (1, 8, 2, 8) if size.smoke else (8, 256, 14, 64)
    for dtype in (torch.float32, torch.bfloat16):
        title = f"{B * T} tokens, width {H * D}, {str(dtype)[6:]}"
        for layer, runs, moved in (
            ("RMSNorm", rms_norms(torch.randn(B, T, H * D).to(dtype), size), 2),
            (
                "RMSNorm and its gradient",
                rms_norms(torch.randn(B, T, H * D).to(dtype), size, grad=True),
                5,
            ),
            ("RoPE", ropes(torch.randn(B, H, T, D).to(dtype), size), 2),
        ):
            setting = f"{layer}, {title}"
            repeated = {k: repeat(run) for k, run in runs.items()}
            limits = {"copy": measure.copying(B * T * H * D * dtype.itemsize)}
            times = measure.in_turns(repeated, 2 * size.rounds, limits, title=setting)
            for seconds in times.seconds.values():
                seconds[:] = [each / REPEATS for each in seconds]
            work = moved * B * T * H * D * dtype.itemsize
            target = {"RMSNorm": 4.0, "RoPE": 2.0}.get(layer) if dtype == torch.bfloat16 else None
            for kind, peer, aim in (
                ("ours", THEIRS, None),
                ("ours, compiled", THEIRS, target),
                ("ours, compiled", COMPILED, 1.0),
            ):
                yield times.row(setting, kind, peer, limit="copy", work=work, target=aim)


def repeat(run: Callable[[], object]) -> Callable[[], None]:
    def runs() -> None:
        for _ in range(REPEATS):
            run()

    return runs


def rms_norms(x: Tensor, size: Size, grad: bool = False) -> dict[str, Callable[[], object]]:
    """Each way to the norm of ``x`` (B, T, C); with a gradient, forward and backward."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    ours, theirs = RMSNorm(x.shape[-1]).to(x.dtype), Qwen2RMSNorm(x.shape[-1]).to(x.dtype)
    plain = measure.compiled(rms_norm, size)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        THEIRS: theirs,
        "ours": ours,
        COMPILED: measure.compiled(theirs.forward, size),
        "ours, compiled": lambda x: plain(x, ours.weight, ours.eps),
    }
    x, upstream = x.requires_grad_(grad), torch.randn_like(x)

    def run(way: Callable[[Tensor], Tensor], weight: Tensor) -> Callable[[], object]:
        if not grad:
            return torch.no_grad()(lambda: way(x))
        return lambda: torch.autograd.grad(way(x), [x, weight], upstream)

    return {k: run(way, (ours if "ours" in k else theirs).weight) for k, way in ways.items()}


def ropes(x: Tensor, size: Size) -> dict[str, Callable[[], object]]:
    """Each way to turn queries ``x`` (B, H, T, D); theirs always turns keys, too: half of each."""
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    q, k = (half.contiguous() for half in x.chunk(2, dim=1))
    cos, sin = rotation(torch.arange(x.shape[2])[None], inverse_frequencies(x.shape[3], 1e6))
    full = [torch.cat([part, part], dim=-1)[:, 0].to(x.dtype) for part in (cos, sin)]
    their_compiled = measure.compiled(apply_rotary_pos_emb, size)

    def both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin)

    our_compiled = measure.compiled(both, size)
    return {
        THEIRS: lambda: apply_rotary_pos_emb(q, k, *full),
        "ours": lambda: both(q, k, cos, sin),
        COMPILED: lambda: their_compiled(q, k, *full),
        "ours, compiled": lambda: our_compiled(q, k, cos, sin),
    }
