"""The page on the families of decoders in `transformers`, from what the package stores of them."""

from typing import Any

from gallery import pages

from lm_from_scratch.checkpoint import ideas
from lm_from_scratch.checkpoint.families import families, stored


def link(name: str) -> str:
    """An idea as a link to its lesson, if it has one."""
    idea = ideas.IDEAS[name]
    return f":doc:`{idea.label} <{pages.document(idea.page)}>`" if idea.page else idea.label


def size(count: int | None) -> str:
    """A number of parameters, as people say it."""
    if count is None:
        return ""
    return f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def table() -> list[tuple[str, str, list[ideas.Line]]]:
    """The families with the size of their default config and their ideas."""
    return [
        (name, size(family.parameters), ideas.describe({"model_type": name}))
        for name, family in families().items()
    ]


def values() -> dict[str, Any]:
    """What `families.rst` is filled with; ``silent`` is the share of entries, an idea of a family
    each, for which no key of the config speaks."""
    entries = [line for _, _, lines in table() for line in lines]
    counts = {name: count for name, count in ideas.counts().items() if count}
    return {
        "families": table(),
        "labels": {name: idea.label for name, idea in ideas.IDEAS.items()},
        "rows": [
            [link(name), str(counts[name])] for name in sorted(counts, key=lambda n: -counts[n])
        ],
        "link": link,
        "release": stored()["transformers"],
        "left_out": stored()["left_out"],
        "silent": sum(not line.keys for line in entries) / len(entries),
    }
