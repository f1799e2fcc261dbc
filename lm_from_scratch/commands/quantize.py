"""``quantize``: a model with weights of 8 or 4 bits."""

import argparse
import shlex

import torch

from lm_from_scratch.checkpoint.folders import local_folder
from lm_from_scratch.checkpoint.weights import load_checkpoint, plain_tensors, save_pretrained
from lm_from_scratch.commands.generate import tokenizer_of
from lm_from_scratch.commands.options import new_folder, not_empty, positive
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.program import PROGRAM
from lm_from_scratch.weights.packed_int8 import PackedInt8Weight, largest_code
from lm_from_scratch.weights.quantize import WEIGHTS, quantize_, quantized_weights


def run(args: argparse.Namespace) -> int:
    """Write a model with weights of 8 or 4 bits to a folder of its own."""
    folder = local_folder(args.model)
    out = new_folder(args.out, folder)
    checkpoint, tokenizer = load_checkpoint(folder, "causal_lm"), tokenizer_of(folder)
    model = checkpoint.model
    before = sum(p.nbytes for p in model.parameters())
    was = str(model.head.weight.dtype).removeprefix("torch.")
    model.to(getattr(torch, args.dtype))
    quantize_(model, args.bits, args.group_size, weight_only=args.weight_only)
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


EXAMPLES = """examples
  python -m lm_from_scratch quantize gpt2-docs --bits 8 --out build/int8
  python -m lm_from_scratch quantize path/or/hub-name --bits 4 --group-size 32 --out build/int4
"""


def add_options(p: argparse.ArgumentParser) -> None:
    """A model, a folder for the new one, and what it holds."""
    p.description = "Write a model with weights of 8 or 4 bits, which generate --model reads."
    p.epilog = EXAMPLES
    p.add_argument(
        "model",
        type=not_empty,
        help="gpt2-docs, qwen2-docs, tasks or worlds, or a folder, or a name on the hub",
    )
    p.add_argument("--out", type=not_empty, required=True, help="folder of the new model")
    p.add_argument("--bits", type=int, choices=WEIGHTS, default=8, help="default: 8")
    p.add_argument(
        "--group-size",
        type=positive,
        help="numbers that share a scale; default: a row with 8 bits, 64 with 4",
    )
    p.add_argument(
        "--weight-only",
        action="store_true",
        help="with 8 bits: do not round activations; as fast for one token, slower for many",
    )
    p.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        default="bfloat16",
        help="of scales, of all other weights and of products; default: bfloat16, which is fastest",
    )
