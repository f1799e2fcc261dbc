"""What each family of decoders in `transformers` is made of, observed on the installed release.

    python tests/helpers/family_scan.py [--write] [NAME ...]

says in what the installed release differs from `families.json` of the package: families, keys that
no idea reads, lines of `describe`. With `--write` it also writes that file, which is committed: the
site, the lesson and `describe` read it. A family is every class for text in the mapping of causal
language models, and every part for text of a model for pictures or sound too, that has RMSNorm or
rotates. What its config says is read from the config (lm_from_scratch/checkpoint/ideas.py). The
rest is observed on its model on the meta device: from names and shapes of modules and parameters,
and from one pass, in which calls of the rotation and of the router are counted.
"""

import json
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lm_from_scratch.checkpoint import ideas
from lm_from_scratch.checkpoint.families import Family, stored

FILE = Path(ideas.__file__).with_name("families.json")
#: Numbers that some default configs leave out, for which any will do.
FILLED = {
    "head_dim": 128, "num_key_value_heads": 8, "n_routed_experts": 8, "num_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "indexer_budget": 64, "indexer_head_dim": 64,
    "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_compress_ratio": 4,
}  # fmt: skip
#: Keys of a config that say nothing of how a model is built.
DULL = re.compile(
    r"dropout|_pdrop|token_id|initializer|_loss|loss_|aux|jitter|output_|chunk_size_feed|architectures"
    r"|dtype|use_cache|classifier|pretraining_tp|_init$|_init_|time_step|transformers_version|_eps$|_epsilon$"
)
#: Of a layer of a cache what does not grow.
STATES = ("conv", "recurrent")
FEED_FORWARD = re.compile(r"layers\.\d+\.(mlp|feed_forward|block_sparse_moe|moe)$")


# ---------------------------------------------------------------------- the installed package


def classes() -> dict[str, str]:
    """The class of each `model_type`: with a head, or the part for text of a larger model."""
    from transformers.models.auto import modeling_auto as auto

    heads = {n: k for n, k in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if "ForCausalLM" in k}
    texts = {n: k for n, k in auto.MODEL_MAPPING_NAMES.items() if n.endswith("_text")}
    return {name: kind for name, kind in texts.items() if "TextModel" in kind} | heads


def candidates() -> dict[str, Any]:
    """The default config of every language model, by its `model_type`."""
    import transformers

    found = {}
    for name in classes():
        with suppress(Exception):  # one that needs other configs beside its own
            config = transformers.AutoConfig.for_model(name)
            said = config.to_dict()
            parts = [value for key, value in said.items() if key.endswith("_config")]
            alone = not any(isinstance(part, dict) and "model_type" in part for part in parts)
            if alone and not config.is_encoder_decoder:
                found[name] = config
    return found


def built(name: str, config: Any) -> tuple[Any, bool]:
    """The model of a family on the meta device, and whether its defaults were complete. Where they
    are not, so many numbers are filled in as it needs, and no more: some switch an idea on."""
    import torch
    import transformers

    kind = getattr(transformers, classes()[name])
    with torch.device("meta"):
        with suppress(Exception):
            return kind(config), True
        for key, value in FILLED.items():
            if getattr(config, key, 0) is None:
                setattr(config, key, value)
                with suppress(Exception):
                    return kind(config), False
        return kind(config), False


def scan(names: Collection[str] = ()) -> dict[str, Any]:
    """What is stored of all families, or of some. One that cannot be built is named as left out."""
    import transformers

    transformers.logging.set_verbosity_error()
    found: dict[str, Any] = {}
    left_out = []
    for name, config in candidates().items():
        if names and name not in names:
            continue
        said = config.to_dict()
        try:
            with warnings.catch_warnings(action="ignore"):
                model, complete = built(name, config)
        except Exception:
            left_out.append(name)
            continue
        norms = any("RMSNorm" in type(module).__name__ for module in model.modules())
        if not norms and "rope_parameters" not in said:
            continue
        total = sum(p.numel() for p in model.parameters())
        model.config.allow_global_per_layer_attribute_access = (
            True  # one width of heads is enough here
        )
        with warnings.catch_warnings(action="ignore"):
            code = dict(observed(model))
        if not any(said.get(key) for key in ideas.EXPERTS) and "experts" in code:
            code["experts"] = "as many as the config says"
        found[name] = {
            "config": {k: v for k, v in said.items() if telling(k, v)},
            "parameters": total if complete and "ForCausalLM" in classes()[name] else None,
            "code": code,
        }
    return {"transformers": transformers.__version__, "left_out": left_out, "families": found}


def telling(key: str, value: Any) -> bool:
    """Whether a key of a config says how the model is built."""
    kept = key in ("rms_norm_eps", "model_type") or not DULL.search(key)
    plain = not key.startswith("_") and key not in ("id2label", "label2id", "return_dict")
    return (
        kept and plain and value is not None and key not in ("problem_type", "is_encoder_decoder")
    )


# -------------------------------------------------------------------------------- what code says


def names_of(model: Any) -> set[str]:
    """The names of modules, parameters and buffers, without the numbers of layers."""
    every = [*model.named_modules(), *model.named_parameters(), *model.named_buffers()]
    return {re.sub(r"\.\d+(?=\.|$)", "", name) for name, _ in every}


def observed(model: Any) -> Iterator[tuple[str, str]]:
    """The ideas that a model shows, whatever its config says."""
    names = names_of(model)

    def has(pattern: str) -> bool:
        return any(re.search(pattern, name) for name in names)

    kinds = {type(module).__name__ for module in model.modules()}
    if any("RMSNorm" in kind for kind in kinds):
        yield "rms_norm", "in place of LayerNorm"
    if placed := norms_after(model):
        yield "norm_after", placed
    if has(r"(q_proj|query_key_value|qkv_proj|Wqkv)\.bias$"):
        yield "bias", "q, k and v"
    if normed := query_norm(model):
        yield "qk_norm", normed
    yield from router(model, has)
    if has(r"kv_b_proj$") and has(r"kv_a_proj_with_mqa$"):
        yield "latent", "keys and values from a latent"
    if has(r"attn\.\w*sinks?\w*$"):
        computed = has(r"attn\.\w*sinks?_proj$")
        yield "sinks", f"a {'number of the token' if computed else 'learned number'} for each head"
    if is_gated(model):
        yield "gate", "the output of each head is scaled"
    yield from positions(model, has)
    if has(r"\.(b_proj|in_proj_b|in_proj_ba)(\.weight)?$") and has(r"A_log$"):
        yield "delta", "a state that is corrected"
    elif has(r"(mamba|mixer)\.A_log$"):
        yield "state_space", "a state for each feature"
    elif has(r"rg_lru|\.conv\.conv$|slope_rate|(m|s)lstm"):
        yield "recurrent", "a state, or a short convolution"
    if has(r"\bindexer\."):
        yield "sparse", "an indexer chooses the keys"
    ignored = " ".join(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    if re.search(r"mtp|nextn", ignored):
        yield "several", "weights in the files, not in the class"
    if has(r"(attn_hc|hyper_connection)\."):
        yield "hyper", "several residual streams"


def layer_of(model: Any) -> Any:
    """The list of the layers: the longest list of modules that have attention or a mixer."""
    from torch import nn

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=())


def norms_after(model: Any) -> str:
    """Whether the layers normalise what a sub-layer gives, beside or instead of what it takes."""
    after = before = 0
    for layer in layer_of(model):
        names = [name for name, _ in layer.named_children() if re.search(r"norm\d?$", name)]
        late = [name for name in names if name.startswith("post_")]
        if len(names) == len(late) > 1:
            after += 1
        elif len(names) >= 4 and len(late) >= 2:
            before += 1
    return "after only" if after else "before and after" if before else ""


def query_norm(model: Any) -> str:
    """What is normalised of queries and keys: each head, or all of them at once."""
    for name, module in model.named_modules():
        if "indexer" in name or "compressor" in name or "cross" in name:
            continue
        if re.search(r"attn?\w*\.(q_norm|q_layernorm|query_norm|query_layernorm|qk_norm)$", name):
            weight = getattr(module, "weight", None)
            heads = getattr(model.config, "num_attention_heads", 1)
            width = getattr(model.config, "head_dim", None) or model.config.hidden_size // heads
            whole = weight is not None and weight.numel() >= heads * width > width
            return "over all heads at once" if whole else "for each head"
    return ""


def is_gated(model: Any) -> bool:
    """Whether attention has a gate: a projection of its own, or queries twice as wide as what the
    output takes."""
    for name, module in model.named_modules():
        if not re.search(r"(attn|attention)$", name) or hasattr(module, "A_log"):
            continue
        parts = dict(module.named_children())
        if {"g_proj", "gate_proj", "q_gate_proj"} & set(parts) and "forget_gate" not in parts:
            return True
        q, o = (getattr(parts.get(key), "weight", None) for key in ("q_proj", "o_proj"))
        if q is not None and o is not None and q.ndim == 2 and len(q) == 2 * o.shape[1]:
            return True
    return False


def router(model: Any, has: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """What the first layer with experts does with the scores of a token."""
    import torch
    from torch.overrides import TorchFunctionMode

    block = next((m for m in model.modules() if hasattr(m, "experts")), None)
    if block is None:
        return
    count = next((len(p) for p in block.experts.parameters() if p.ndim == 3), 0)
    if count == 1:  # one expert is a feed-forward layer
        return
    yield "experts", str(count) if count else "of several kinds"
    if has(r"(mlp|moe|feed_forward|block)\w*\.shared_(expert|mlp)s?\b"):
        yield "shared", "for every token"
    if has(r"(correction_bias|expert_bias|balancing_biases)$"):
        yield "router_bias", "it chooses experts, and weighs none"
    called = set()

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = getattr(func, "__name__", "")
            if args and getattr(args[0], "shape", None) and args[0].shape[-1] >= max(2, count):
                called.add(name)
            return func(*args, **(kwargs or {}))

    forward = block.experts.forward
    block.experts.forward = lambda x, *others, **more: x
    x = torch.zeros(1, 3, model.config.hidden_size, device="meta")
    with suppress(Exception), Watch(), torch.no_grad():
        block(x)
    block.experts.forward = forward
    if "sigmoid" in called:
        yield "sigmoid", "scores by sigmoid"


@contextmanager
def replaced(module: Any, new: dict[str, Any]) -> Iterator[None]:
    """For a while, names of a module mean something else."""
    old = {name: getattr(module, name) for name in new}
    vars(module).update(new)
    try:
        yield
    finally:
        vars(module).update(old)


def positions(model: Any, has: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """How many features turn, and in how many layers with attention."""
    config = model.config
    width = getattr(config, "head_dim", None)
    turned = [2 * len(b) for name, b in model.named_buffers() if name.endswith("inv_freq")]
    if width and turned and max(turned) < width and not has("kv_a_proj_with_mqa"):
        yield "partial", f"{max(turned)} of {width} features turn"
    layers = attending(model)
    turning = rotating_layers(model)
    if layers and turning is not None and turning < layers:
        yield "unrotated", f"{layers - turning} of {layers} layers with attention do not turn"


def cached(name: str, *lengths: int) -> tuple[dict[str, Any], list[int], int]:
    """The default config of a family, with what it leaves out filled in, and how many numbers the
    cache of `transformers` holds after a pass of so many tokens, for each of these lengths: of keys
    and what stands for them, and of states, which do not grow. Raises whatever a pass on the meta
    device raises; what comes after attention is left out of it."""
    import torch
    import transformers

    model, _ = built(name, transformers.AutoConfig.for_model(name))
    config = {k: v for k, v in model.config.to_dict().items() if telling(k, v)}
    blocks = [
        module
        for name, module in model.named_modules()
        if FEED_FORWARD.search(name) or type(module).__name__.endswith(("MoE", "MoeBlock"))
    ]

    def layers(length: int) -> Any:
        ids = torch.zeros(1, length, dtype=torch.long, device="meta")
        with torch.no_grad():
            return model.eval()(ids, use_cache=True).past_key_values.layers

    def numbers(value: Any) -> int:
        return sum(tensor.numel() for tensor in {id(t): t for t in tensors_of(value)}.values())

    try:
        for block in blocks:
            block.forward = lambda x, *others, **more: x
        layers(1)
    except Exception:  # some return a pair
        for block in blocks:
            block.forward = lambda x, *others, **more: (x, None)
    passes = [layers(length) for length in lengths]
    held = [getattr(layer, f"{kind}_states", {}) for layer in passes[0] for kind in STATES]
    growing = [sum(map(numbers, map(vars, one))) - numbers(held) for one in passes]
    return config, growing, numbers(held)


def tensors_of(value: Any) -> Iterator[Any]:
    """The tensors of three and more dimensions inside of lists and dictionaries."""
    import torch

    if isinstance(value, torch.Tensor):
        yield from [value] * (value.ndim > 2)
    elif isinstance(value, Mapping):
        yield from tensors_of([*value.values()])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_of(one)


def attending(model: Any) -> int:
    """The number of layers that project keys."""
    keys = re.compile(r"\.(k_proj|kv_proj|qkv_proj|kv_b_proj|query_key_value|c_attn)(\.weight)?$")
    return sum(
        any(keys.search(name) for name, _ in layer.named_modules())
        and not any(name.endswith(("A_log", "slope_rate")) for name in names_of(layer))
        for layer in layer_of(model)
    )


def rotating_layers(model: Any) -> int | None:
    """In how many layers a pass calls the rotation; None where a pass cannot be watched."""
    import torch

    file = sys.modules[type(model).__module__]
    turns = [n for n in vars(file) if n.startswith("apply_") and "rot" in n]
    masks = [n for n in vars(file) if n.startswith("create_") and "mask" in n]
    if not turns:
        # A family without a rotation has none at all, unless another file turns for it.
        return None if has_rotation(model) else 0
    for several in (False, True):  # some feed-forward layers return a pair
        current, called = [-1], set()

        def counted(function: Callable[..., Any], called: Any = called, now: Any = current) -> Any:
            def call(*args: Any, **more: Any) -> Any:
                called.add(now[0])
                return function(*args, **more)

            return call

        def keep(x: Any, *others: Any, several: bool = several, **more: Any) -> Any:
            return (x, None) if several else x

        hooks = [
            layer.register_forward_pre_hook(lambda *_, i=i, now=current: now.__setitem__(0, i))
            for i, layer in enumerate(layer_of(model))
        ]
        blocks = [module for name, module in model.named_modules() if FEED_FORWARD.search(name)]
        for block in blocks:
            block.forward = keep
        new: dict[str, Any] = {name: counted(getattr(file, name)) for name in turns}
        new |= dict.fromkeys(masks, lambda *_, **__: None)
        ids = torch.zeros(1, 5, dtype=torch.long, device="meta")
        done = False
        with suppress(Exception), replaced(file, new), torch.no_grad():
            model(ids, use_cache=False)
            done = True
        for hook in hooks:
            hook.remove()
        for block in blocks:
            del block.forward
        if done:
            return len(called)
    return None


def has_rotation(model: Any) -> bool:
    return any("inv_freq" in name for name, _ in model.named_buffers())


def written(found: Mapping[str, Any]) -> str:
    """The file: a line for each family."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(one, sort_keys=True)}"
        for name, one in sorted(found["families"].items())
    ]
    head = {key: found[key] for key in ("transformers", "left_out")}
    families = ",\n".join(lines)
    return f'{json.dumps(head)[:-1]}, "families": {{\n{families}\n}}}}\n'


# ------------------------------------------------------------------------------- two releases


class Watched(dict[str, Any]):
    """A config that notes which of its keys are asked for."""

    def __init__(self, config: Mapping[str, Any], asked: set[str]) -> None:
        super().__init__(config)
        self.asked = asked

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


def read_by_ideas(families: Mapping[str, Any]) -> set[str]:
    """The keys that some idea asks a config for."""
    asked: set[str] = set()
    for one in families.values():
        config = Watched(one["config"], asked)
        for idea in ideas.IDEAS.values():
            idea.read(config)
    return asked


def report(found: Mapping[str, Any], kept: Mapping[str, Any]) -> str:
    """In what a scan differs from what was kept of another, line by line."""
    new, old = found["families"], kept["families"]
    lines = [f"transformers {kept['transformers']} ({len(old)} families), then "
             f"{found['transformers']} ({len(new)})"]  # fmt: skip

    def section(title: str, entries: list[str]) -> None:
        lines.extend(["", f"{title}: {len(entries)}", *(f"  {entry}" for entry in entries)])

    def said(name: str, families: Mapping[str, Any]) -> list[str]:
        return [*map(str, ideas.described(Family(**families[name])))]

    section(
        "New families",
        [
            f"{name}: {', '.join(line.partition(':')[0] for line in said(name, new))}"
            for name in sorted(new.keys() - old.keys())
        ],
    )
    section("Families that are gone", sorted(old.keys() - new.keys()))
    section(
        "Families that could be built, and cannot now",
        sorted({*found["left_out"]} - {*kept["left_out"]}),
    )
    known = {key for one in old.values() for key in one["config"]} | read_by_ideas(new)
    section(
        "Keys that no family had and no idea reads",
        [
            f"{name}: {key}={json.dumps(value)[:60]}"
            for name, one in new.items()
            for key, value in one["config"].items()
            if key not in known
        ],
    )
    changed = []
    for name in new.keys() & old.keys():
        before, after = said(name, old), said(name, new)
        changed += [f"{name}: - {line}" for line in before if line not in after]
        changed += [f"{name}: + {line}" for line in after if line not in before]
    section("Lines of describe that changed", sorted(changed))
    return "\n".join(lines)


if __name__ == "__main__":
    write, names = "--write" in sys.argv, [name for name in sys.argv[1:] if name != "--write"]
    kept, found = stored(), scan(names)
    if names:
        found |= {"left_out": kept["left_out"], "families": kept["families"] | found["families"]}
    print(report(found, kept))
    if write:
        FILE.write_text(written(found), encoding="utf-8")
