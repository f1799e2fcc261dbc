"""The names of tensors in published files, and those of the models here.

A file may hold more than the model, or less: names of what was wrapped around it, layers for
multi-token prediction, no prefix, a head that is the embedding once more.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm_from_scratch.checkpoint.architectures import Config
from lm_from_scratch.checkpoint.experts import stacked
from lm_from_scratch.checkpoint.ideas import NEXT, number
from lm_from_scratch.layers.head import TiedHead
from lm_from_scratch.models.heads import Classifier
from lm_from_scratch.models.interface import CausalLM

#: GPT-2's published linear maps are stored as (in, out); ``nn.Linear`` wants (out, in).
TRANSPOSED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")

#: The number of a layer in the name of a tensor.
LAYER = re.compile(r"(?:^|\.)(?:h|layers)\.(\d{1,9})\.")

#: The end of the name of a table that says which experts a token visits, by its id.
TABLE = ".tid2eid"

#: Layers for multi-token prediction, where a file has them under a name of their own.
MTP = re.compile(r"^(model\.)?mtp\.")

#: Of a layer that reads the keys of another, what a file may hold all the same.
UNREAD = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.self_attn\.[kv]_(?:proj|norm)\.")

#: What stands before the names of its part for text in a model for pictures or sound too.
TEXT = re.compile(r"^(model\.)?language_model\.")

#: What ``torch.compile``, FSDP and gradient checkpointing put before the names of what they wrap.
WRAPPER = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")

#: By the class of a config, pieces of the names in its files, each with ours: where several fit,
#: the first is replaced first, and last on the way back. A whole name has "^." before it.
PIECES: dict[str, list[tuple[str, str]]] = {
    "DeepseekV4Config": [
        (".attn.", ".self_attn."), (".attn_norm.", ".input_layernorm."), (".ffn.", ".mlp."),
        (".ffn_norm.", ".post_attention_layernorm."), (".hc_attn_", ".attn_hc."),
        (".hc_ffn_", ".ffn_hc."), ("^.hc_head_", "^.hc_head.hc_"), ("^.embed.", "^.embed_tokens."),
        (".head.", ".lm_head."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."),
        (".w3.", ".up_proj."), (".gate.bias", ".gate.e_score_correction_bias"),
        (".self_attn.attn_sink", ".self_attn.sinks"), (".self_attn.wkv.", ".self_attn.kv_proj."),
        (".self_attn.norm.", ".self_attn.kv_norm."), (".wq_a.", ".q_a_proj."),
        (".self_attn.q_norm.", ".self_attn.q_a_norm."), (".wo_a.", ".o_a_proj."),
        (".self_attn.wq_b.", ".self_attn.q_b_proj."), (".wo_b.", ".o_b_proj."),
        *(
            (f".{theirs}.{piece}", f".compressor{ours}.{word}")
            for theirs, ours in (("indexer.compressor", ".indexer"), ("compressor", ""))
            for piece, word in (
                ("wkv.", "kv_proj."), ("wgate.", "gate_proj."), ("norm.", "kv_norm."),
                ("ape", "position_bias"),
            )
        ),
        (".indexer.wq_b.", ".compressor.indexer.q_b_proj."),
        (".indexer.weights_proj.", ".compressor.indexer.scorer.weights_proj."),
    ],
}  # fmt: skip


def published_name(name: str, config: Any) -> str:
    """The name in a file of a tensor whose name is ours, of a model with that config."""
    for theirs, ours in reversed(PIECES.get(type(config).__name__, [])):
        name = f"^.{name}".replace(ours, theirs)[2:]
    return name


def unwrapped(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The tensors by the names that a model itself gives them, without those of what was wrapped
    around it when it was saved. Raises ``ValueError`` for a name that is there twice then."""
    names = {name: WRAPPER.sub("", name) for name in tensors}
    # of DistributedDataParallel
    while names and all(name.startswith("module.") for name in names.values()):
        names = {name: bare.removeprefix("module.") for name, bare in names.items()}
    if len({*names.values()}) < len(names):
        raise ValueError(f"{folder} has a tensor twice, with and without the name of a wrapper")
    return {bare: tensors[name] for name, bare in names.items()}


def of_text(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of the tensors of a model for pictures or sound too those of its part for text, without what
    stands before their names, and the head; of another model all."""
    if not any(map(TEXT.match, tensors)):
        return dict(tensors)
    parts = re.compile(rf"{TEXT.pattern}|^lm_head\.")
    return {TEXT.sub("", name): tensor for name, tensor in tensors.items() if parts.match(name)}


def without_mtp(
    tensors: Mapping[str, Tensor], n_layer: int, contents: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The tensors of the model itself, without the layers for multi-token prediction that a
    published file holds beside it: ``mtp.*``, or layers after the last of ``n_layer``, as many as
    ``num_nextn_predict_layers`` of ``config.json`` says."""
    more = number(contents, *NEXT)
    end = n_layer + (more[0] if more else 0)

    def is_beside(name: str) -> bool:
        layer = LAYER.search(name)
        return bool(MTP.search(name) or (layer and n_layer <= int(layer[1]) < end))

    return {name: tensor for name, tensor in tensors.items() if not is_beside(name)}


def without_unread(tensors: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The tensors without keys and values of layers that read those of another."""
    first = config.n_layer - getattr(config, "kv_shared_layers", 0)

    def is_unread(name: str) -> bool:
        layer = UNREAD.search(name)
        return layer is not None and first <= int(layer[1])

    return {name: tensor for name, tensor in tensors.items() if not is_unread(name)}


def check_sizes(config: Config, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Raises ``ValueError`` for a config of more layers than the weights have, or of another
    embedding: what would take long to build before the shapes of all tensors are compared."""
    layers = {match[1] for name in tensors if (match := LAYER.search(name))}
    if config.n_layer > len(layers):
        raise ValueError(
            f"{folder} does not fit the model: n_layer={config.n_layer} in config.json, but the "
            f"weights have {len(layers)} layers"
        )
    want = (config.vocab_size, config.n_embd)
    for name, tensor in tensors.items():
        if name.endswith(("wte.weight", "embed_tokens.weight")) and tensor.shape != want:
            raise ValueError(
                f"{folder} does not fit the model: {name} has shape {tuple(tensor.shape)}, not "
                f"{want}, which is (vocab_size, n_embd) of config.json"
            )


def rename(tensors: Mapping[str, Tensor], model: CausalLM | Classifier) -> dict[str, Tensor]:
    """From a checkpoint's names and layout to those of ``model``.

    Files of a bare backbone have no ``transformer.`` or ``model.`` prefix. A stored head must equal
    the token embedding where ours is the embedding. Experts are stacked. Raises ``ValueError`` for
    a name that stands there twice, and for a head that our model cannot have.
    """
    head = model.head if isinstance(model, CausalLM) else None
    renamed = {}
    for name, tensor in tensors.items():
        name = our_name(name, model)
        if name in renamed:
            raise ValueError(f"{name} is there twice, with and without the prefix")
        if name.endswith(TABLE) and not tensor.is_floating_point():
            tensor = tensor.long()  # files may have it in 32 bits
        swap = TRANSPOSED.search(name) and tensor.dim() == 2
        renamed[name] = tensor.T.contiguous() if swap else tensor
    if isinstance(head, TiedHead) and "lm_head.weight" in renamed:
        stored_head = renamed.pop("lm_head.weight")
        names = {id(tensor): name for name, tensor in model.named_parameters()}
        embedding = names[id(head.weight)]
        if not torch.equal(stored_head, renamed.setdefault(embedding, stored_head)):
            may = hasattr(model.backbone.config, "tie_word_embeddings")
            remedy = (
                "write tie_word_embeddings: false there" if may else "no GPT-2 here has its own"
            )
            raise ValueError(
                f"lm_head.weight differs from {embedding}, and config.json says that the embedding "
                f"is the head: {remedy}"
            )
    return stacked(renamed)


def our_name(name: str, model: CausalLM | Classifier) -> str:
    """The name that ``model`` gives to a tensor of a checkpoint."""
    prefix = f"{model.backbone.prefix}."
    for theirs, ours in PIECES.get(type(model.backbone.config).__name__, ()):
        name = f"^.{name}".replace(theirs, ours)[2:]
    name = name.replace("classifier.", "score.") if name.startswith("classifier.") else name
    return name if name.startswith((prefix, "lm_head.", "score.")) else prefix + name
