"""Whether a model holds its stories together.

It is asked about plots that it was not trained on, and the stories that it tells are checked.
"""

from typing import Any

from lm_from_scratch.instruments.storyteller import answered, new_plots, told
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.text.plots import PlotConfig
from lm_from_scratch.text.tokenizer import Tokenizer

#: What was never trained on: as the corpus, and more of each than it has.
SIZES = {
    "as trained": None,
    "6 people": PlotConfig(people=6, rooms=4, boxes=2, things=4),
    "7 things": PlotConfig(people=3, rooms=4, boxes=3, things=7),
    "16 events": PlotConfig(people=3, rooms=4, boxes=2, things=3, events=16),
}


def coherence(model: CausalLM, tokenizer: Tokenizer, language: str, n: int = 200) -> dict[str, Any]:
    """In one language: of the questions of ``n`` new plots of each size, how many the model answers
    rightly; and what is sound in ``n`` stories that it tells."""
    scores: dict[str, Any] = {"questions": {}}
    for name, config in SIZES.items():
        counts = answered(model, tokenizer, new_plots(n, config), language)
        if config is None:
            scores["kinds"] = {kind: share(*count) for kind, count in counts.items()}
        scores["questions"][name] = share(*map(sum, zip(*counts.values(), strict=True)))
    _, report, whole = told(model, tokenizer, language, n, temperature=1.0)
    scores["told"] = {
        "stories": n,
        "sentences of the grammar": share(report.readable, report.sentences),
        "events that can happen": share(report.possible, report.events),
        "answers that are right": share(report.right, report.questions),
        "stories without a fault": share(whole, n),
    }
    return scores


def share(part: int, whole: int) -> dict[str, Any]:
    """A share, and of how many."""
    return {"share": round(part / max(whole, 1), 4), "of": whole}
