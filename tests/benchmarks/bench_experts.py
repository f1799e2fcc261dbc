"""A layer of experts on a CPU, forward and backward, beside transformers.

It takes its grouped product unless told to loop over experts; both have the same weights as ours.
"""

from collections.abc import Callable, Iterator

import measure
import torch
from measure import Row, Size
from torch import Tensor, nn

from lm_from_scratch.layers.experts import Experts, MixtureOfExperts, SoftmaxRouter

GROUPED, LOOP = "transformers, grouped_mm", "transformers, loop"


def rows(size: Size) -> Iterator[Row]:
    C, F, E, k, N = (16, 8, 4, 2, 8) if size.smoke else (512, 192, 64, 8, 1024)
    for tokens, grad in ((N, False), (N, True), (1, False)):
        runs = ways(C, F, E, k, torch.randn(1, tokens, C), grad)
        work = "forward and backward" if grad else "forward"
        setting = f"{E} experts of width {F}, {k} for each of {tokens} tokens, {work}"
        times = measure.in_turns(runs, 2 * size.rounds, title=setting)
        for peer in (GROUPED, LOOP):
            yield times.row(setting, "ours", peer)


def ways(C: int, F: int, E: int, k: int, x: Tensor, grad: bool) -> dict[str, Callable[[], object]]:
    """Each way through the layer of ``x`` (B, T, C); with a gradient, back too."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = dict(hidden_size=C, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=k)
    ours = MixtureOfExperts(SoftmaxRouter(C, E, k, normalize=True), Experts(E, C, F))
    layers: dict[str, nn.Module] = {"ours": ours}
    for name, way in ((GROUPED, "grouped_mm"), (LOOP, "eager")):
        config = Qwen3MoeConfig(**sizes, norm_topk_prob=True)
        config._experts_implementation = way
        layers[name] = Qwen3MoeSparseMoeBlock(config)
        layers[name].load_state_dict(ours.state_dict())
    upstream = torch.randn_like(x)
    x = x.requires_grad_(grad)

    def run(layer: nn.Module) -> Callable[[], object]:
        if not grad:
            return torch.no_grad()(lambda: layer(x))
        return lambda: torch.autograd.grad(layer(x), [x, *layer.parameters()], upstream)

    return {name: run(layer) for name, layer in layers.items()}
