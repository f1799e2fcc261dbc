"""``quantize``: a model with weights of 8 or 4 bits."""

import shlex

import torch

from lm_from_scratch.checkpoint.folders import local_folder
from lm_from_scratch.checkpoint.weights import plain_tensors, save_pretrained
from lm_from_scratch.commands.loading import new_folder, tokenizer_of
from lm_from_scratch.commands.options import QuantizeOptions
from lm_from_scratch.interop.peft import load_with_adapter
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.program import PROGRAM
from lm_from_scratch.weights.packed_int8 import PackedInt8Weight, largest_code
from lm_from_scratch.weights.quantize import quantize_, quantized_weights


def run(options: QuantizeOptions) -> int:
    """Write a model with weights of 8 or 4 bits to a folder of its own."""
    folder = local_folder(options.model)
    out = new_folder(options.out, folder)
    checkpoint, tokenizer = load_with_adapter(folder, "causal_lm"), tokenizer_of(folder)
    model = checkpoint.model
    before = sum(p.nbytes for p in model.parameters())
    was = str(model.head.weight.dtype).removeprefix("torch.")
    model.to(getattr(torch, options.dtype))
    quantize_(model, options.bits, options.group_size, weight_only=options.weight_only)
    save_pretrained(model, out, tokenizer, published=checkpoint.published)
    after = sum(t.nbytes for t in plain_tensors(dict(model.named_parameters())).values())
    print(f"{before} bytes of weights before, in {was}; {after} after: {after / before:.0%}")
    print(f"products: {products_of(model)}")
    print(f"model written to {out}")
    print(f"try: {PROGRAM} generate --model {shlex.quote(str(out))} --prompt The")
    return 0


def products_of(model: CausalLM) -> str:
    """How the quantised weights of a model are multiplied on this processor."""
    packed = [w for w in quantized_weights(model).values() if isinstance(w, PackedInt8Weight)]
    if not packed or not packed[0].packed.multiplies:
        return "activations as they are, weights decoded"
    if packed[0].weight_only:
        return "activations as they are, in several digits of 8 bits"
    return f"in 8 bits, activations rounded row by row to codes of at most {largest_code()}"
