"""What is stored of each family is what the installed `transformers` shows, and has its page."""

from __future__ import annotations

import importlib.metadata
import json

import family_scan
import pytest
from api import families
from gallery import pages
from sources.templates import render

from lm_from_scratch.checkpoint import cache_sizes, ideas
from lm_from_scratch.checkpoint.families import families as known_families
from lm_from_scratch.checkpoint.families import stored
from lm_from_scratch.checkpoint.ideas import describe

installed = importlib.metadata.version("transformers")
same_release = pytest.mark.skipif(
    installed != stored()["transformers"],
    reason=f"stored of transformers {stored()['transformers']}, not of {installed}",
)

#: What is known of some families, from their reports.
KNOWN = {
    "qwen2": ({"rms_norm", "bias"}, {"qk_norm", "experts", "gate"}),
    "qwen3": ({"qk_norm"}, {"experts", "bias", "unrotated", "gate"}),
    "gpt_oss": ({"sinks", "experts", "window", "bias"}, {"sigmoid", "shared", "latent"}),
    "deepseek_v3": (
        {"latent", "experts", "shared", "sigmoid", "router_bias", "several"},
        {"qk_norm", "grouped", "sparse", "partial"},
    ),
    "deepseek_v32": ({"latent", "sparse", "sigmoid"}, {"delta"}),
    "smollm3": ({"unrotated", "tied"}, {"qk_norm", "experts", "window"}),
    "cohere2": ({"unrotated", "window"}, {"experts"}),
    "glm4_moe": ({"partial", "experts", "sigmoid", "router_bias", "several"}, {"latent"}),
    "qwen3_next": ({"delta", "gate", "qk_norm", "partial", "shared"}, {"latent", "sigmoid"}),
    "mixtral": ({"experts", "grouped"}, {"sigmoid", "router_bias", "shared"}),
    "gemma2": ({"cap", "norm_after", "window"}, {"qk_norm"}),
    "gemma3_text": ({"thetas", "qk_norm", "norm_after"}, {"cap", "experts"}),
    "kimi_linear": ({"delta", "latent", "unrotated"}, {"sinks"}),
    "mamba2": ({"state_space"}, {"delta", "unrotated"}),
    "deepseek_v4": ({"hyper", "sinks", "sparse", "window", "router_bias"}, {"latent", "delta"}),
    "qwen4_exp_text": ({"hyper", "delta", "gate", "sparse", "qk_norm"}, {"sinks", "latent"}),
    "glm5_next_text": ({"hyper", "latent", "delta", "sparse"}, {"sinks", "gate"}),
    "mistral_large4_text": ({"latent", "sparse", "cap", "unrotated"}, {"hyper", "sinks", "delta"}),
    "llama": ({"rms_norm"}, {"qk_norm", "bias", "window", "experts", "unrotated"}),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_families_have_the_ideas_that_they_have(name: str) -> None:
    found = {line.name for line in describe({"model_type": name})}
    has, has_not = KNOWN[name]
    assert has <= found
    assert not found & has_not


def test_which_ideas_have_no_key() -> None:
    """A config of Qwen3 does not say that it normalises, nor one of gpt-oss that it has sinks."""
    for name, idea in (("qwen3", "qk_norm"), ("gpt_oss", "sinks"), ("qwen3_next", "gate")):
        lines = {line.name: line for line in describe({"model_type": name})}
        assert lines[idea].keys == ()
    assert {line.name: line.keys for line in describe({"model_type": "smollm3"})}["unrotated"]


def same(names: list[str]) -> None:
    """The installed release shows what is stored, of these families or of all."""
    now = json.loads(family_scan.written(family_scan.scan(names)))
    kept = stored()["families"]
    for name in names or kept:
        assert now["families"][name] == kept[name], name


def test_some_families_are_as_stored() -> None:
    """In each release that the package is used with."""
    same(["qwen3_next", "gpt_oss"])


@same_release
@pytest.mark.slow
def test_all_families_are_as_stored() -> None:
    same([])


#: Families whose class makes no pass on the meta device, or none with its default config.
CANNOT_RUN = {
    **dict.fromkeys(("bamba", "granitemoehybrid"), "no layer with attention by default"),
    **dict.fromkeys(
        ("glm4v_moe_text", "glm4v_text", "glm_image_text", "hunyuan_vl_text"),
        "no sections of the rotation by default",
    ),
    **dict.fromkeys(("glm5_next_text", "jetmoe"), "what is chosen depends on numbers"),
    "embedding_gemma2_text": "an encoder, which has no cache",
    "qwen4_exp_text": "sections of the rotation that do not fit the head by default",
    "recurrent_gemma": "its layers keep their cache themselves",
    "xlstm": "its states are no layers of a cache",
}
#: Whose cache has more than is counted, whatever the length of the text.
HOLDS_MORE = {"deepseek_v4": "tokens of a block that is not full"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.slow) for name in known_families()),
    ],
)
def test_a_cache_has_the_numbers_that_are_counted(name: str) -> None:
    """Of the class on the meta device: what it keeps of 32 tokens, what 128 more add beyond most
    windows, and the states. (A window of transformers keeps one token less than it sees; states
    that are computed token by token are passed with fewer tokens.)"""
    config = known_families()[name].config
    lengths = (4, 8, 16) if "state_space" in {i.name for i in describe(config)} else (32, 256, 384)
    try:
        config, theirs, states = family_scan.cached(name, *lengths)
    except Exception as error:
        if installed == stored()["transformers"] and name not in CANNOT_RUN:
            raise
        pytest.skip(CANNOT_RUN.get(name, f"no pass on the meta device: {error}"))
    ours = [cache_sizes.cached_numbers(config, length) for length in lengths]
    assert ours[2] - ours[1] == theirs[2] - theirs[1]
    assert ours[0] == theirs[0] or (name in HOLDS_MORE and ours[0] < theirs[0])
    if states:
        assert cache_sizes.states(config) == states


def test_a_report_says_what_a_new_release_changed() -> None:
    """Of what is stored, against an older store that lacks a family, a key and an idea."""
    now = stored()
    old = json.loads(json.dumps(now)) | {"transformers": "5.0.0", "left_out": []}
    old["families"]["bygone"] = old["families"].pop("smollm3")
    for family in old["families"].values():
        family["config"].pop("full_attention_interval", None)
        family["config"].pop("linear_conv_kernel_dim", None)
    old["families"]["qwen3"]["code"] = {"gate": "each head is scaled"}
    report = family_scan.report(now, old)
    new, gone, left, keys, lines = (part.splitlines()[1:] for part in report.split("\n\n")[1:])
    assert [line.split(":")[0].strip() for line in new] == ["smollm3"] and "Tied head" in new[0]
    assert [line.strip() for line in gone] == ["bygone"]
    assert [line.strip() for line in left] == sorted(now["left_out"])
    assert keys and all("linear_conv_kernel_dim=" in line for line in keys)
    assert [line.split(":")[1].strip()[:1] for line in lines] == ["+", "-"]
    assert "QK-norm" in lines[0] and "Gated attention" in lines[1]
    same = family_scan.report(now, now).splitlines()
    assert all(line.endswith(": 0") for line in same[1:] if line)


def test_every_idea_leads_to_a_page_of_the_course() -> None:
    assert {idea.page for idea in ideas.IDEAS.values()} <= set(pages.in_order())


def test_a_sink_is_learned_or_computed_of_the_token() -> None:
    texts = {name: family.code.get("sinks") for name, family in known_families().items()}
    assert texts["gpt_oss"] == "a learned number for each head"
    assert texts["inkling2_text"] == "a number of the token for each head"


def test_the_page_has_a_card_for_each_family() -> None:
    text = render("families.rst", **families.values())
    assert text.count("container:: bug family") == len(known_families()) > 100
    for name in known_families():
        assert f"**{name}**" in text
    used = {name for name, count in ideas.counts().items() if count}
    assert used == set(ideas.IDEAS) - {"ngrams"}  # in layers that no default config names
    assert all(f"uses-{name.replace('_', '-')}" in text for name in used)
