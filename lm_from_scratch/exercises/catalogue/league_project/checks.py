"""A method of one's own in the league: what it reads and writes, beside the methods of the page."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.exercises.exercise import Call, Case, Exercise, call, planted
from lm_from_scratch.inside import league as play
from lm_from_scratch.inside.lens import logit_lens
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.text.story_grammar import ROOMS

LAYER, FIRST, SETS = 3, 1000, 4


@lru_cache(maxsize=SETS)
def played(stories: int) -> tuple[play.Round, dict[str, play.Row]]:
    """A round, and the rows of the page that take little time, the guess first."""
    model, tokenizer = load_shipped("worlds")
    model = model.float().requires_grad_(False)
    (one,) = play.rounds(model, tokenizer, 1, labelled=300, new=240, first=FIRST + stories)
    methods = {
        "linear probe": play.probe,
        "mean difference": play.mean_difference,
        "logit lens": play.through_lens(logit_lens(model), one.new.questions.words),
        "other story": play.other_story,
    }
    return one, {row.method: row for row in play.league([one], methods, LAYER, (1,))}


def reference(
    model: CausalLM, layer: int, states: Tensor, rooms: Tensor
) -> tuple[play.Read, play.Write]:
    """Least squares with a penalty reads, the rows of the package's head write."""
    middle, share = states.mean(0), F.one_hot(rooms, len(ROOMS)).float()
    x, prior = states - middle, share.mean(0)
    penalty = 0.1 * x.square().sum() / x.shape[1] * torch.eye(x.shape[1])
    weight = torch.linalg.solve(x.T @ x + penalty, x.T @ (share - prior))
    _, tokenizer = load_shipped("worlds")
    words = torch.tensor([tokenizer.encode(f" {room}")[0] for room in ROOMS])
    rows = model.head(torch.eye(x.shape[1]))[:, words].T
    return (
        lambda x: ((x - middle) @ weight + prior).argmax(-1),
        lambda x, new: x + rows[new] - rows.mean(0),
    )


# ------------------------------------------------------------------------------------- the marks


@dataclass(frozen=True, eq=False)
class Mark:
    """A share that must be above another, or below it. All that reach their mark are alike."""

    share: float
    bound: float
    of: str
    below: bool = False

    @property
    def reached(self) -> bool:
        return self.share < self.bound if self.below else self.share > self.bound

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mark) or self.reached != other.reached:
            return False
        return self.reached or self.share == other.share

    def __repr__(self) -> str:
        word = "below" if self.below else "above"
        return f"{word} {self.bound:.1%} ({self.of})" if self.reached else f"{self.share:.1%}"


def form(function: Callable[..., Any], stories: int) -> dict[str, Any]:
    """What holds of the two functions, however good they are."""
    one, _ = played(stories)
    states, rooms = one.labelled.states[LAYER].clone(), one.labelled.questions.rooms.clone()
    x, new = one.new.states[LAYER].clone(), one.others.clone()
    given = [states, rooms, x, new]
    before = [tensor.clone() for tensor in given]
    read, write = function(one.new.model, LAYER, states, rooms)
    said, moved = read(x), write(x, new)
    same = all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    found: dict[str, Any] = {
        "the arguments are as they were": same,
        "the shape of what read returns": list(said.shape),
        "read returns whole numbers": not said.is_floating_point(),
        "read returns numbers from -1 to 7": bool(((said >= -1) & (said < len(ROOMS))).all()),
        "the shape of what write returns": list(moved.shape),
        "the dtype of what write returns": str(moved.dtype),
    }
    if found["the shape of what write returns"] == list(x.shape):
        step, other = moved - x, write(x, (new + 1) % len(ROOMS)) - moved
        found["write moves every state"] = bool((step.norm(dim=-1) > 1e-4).all())
        found["where it moves to depends on the room"] = bool((other.norm(dim=-1) > 1e-4).all())
        alone = [(read(x[i : i + 1]), write(x[i : i + 1], new[i : i + 1])) for i in range(8)]
        rooms, states = (torch.cat(each) for each in zip(*alone, strict=True))
        near = (states - moved[:8]).norm() < 0.01 * step[:8].norm()
        found["a state alone is read and written as it is among others"] = bool(
            near and torch.equal(rooms, said[:8])
        )
    return found


def with_copies(function: Callable[..., Any]) -> play.Method:
    """A method that cannot write into the states of the round."""

    def method(
        model: CausalLM, layer: int, states: Tensor, rooms: Tensor
    ) -> tuple[play.Read, play.Write]:
        read, write = function(model, layer, states.clone(), rooms.clone())
        return lambda x: read(x.clone()), lambda x, new: write(x.clone(), new.clone())

    return method


def row(
    function: Callable[..., Any], stories: int, *sizes: float
) -> tuple[play.Row, dict[str, play.Row]]:
    """The row of a method, with its flips at some sizes, and the rows of the page."""
    one, others = played(stories)
    return play.league([one], {"your method": with_copies(function)}, LAYER, sizes)[1], others


def best(rows: dict[str, play.Row], what: Callable[[play.Row], float]) -> tuple[float, str]:
    return max((what(row), name) for name, row in rows.items() if name != "guess")


RECOVERED, FLIPPED = "the share of rooms that are recovered", "the share of answers that flip"


def as_guess(function: Callable[..., Any], stories: int) -> dict[str, Mark]:
    mine, rows = row(function, stories)
    bound = rows["guess"].recovered[0] * 2 / 3
    return {RECOVERED: Mark(mine.recovered[0], bound, "2/3 of a guess")}


def honest(function: Callable[..., Any], stories: int) -> dict[str, Mark]:
    mine, rows = row(function, stories)
    bound = rows["guess"].false_claims[0] * 0.9
    claims = Mark(mine.false_claims[0], bound, "9/10 of a guess", below=True)
    return {"the share of false claims": claims, **as_guess(function, stories)}


def better(function: Callable[..., Any], stories: int) -> dict[str, Mark]:
    mine, rows = row(function, stories)
    bound = rows["mean difference"].recovered[0]
    return {RECOVERED: Mark(mine.recovered[0], bound, "mean difference")}


def beyond(function: Callable[..., Any], stories: int) -> dict[str, Mark]:
    mine, rows = row(function, stories)
    return {RECOVERED: Mark(mine.recovered[0], *best(rows, lambda row: row.recovered[0]))}


def control(function: Callable[..., Any], stories: int) -> dict[str, Mark]:
    """Taught twice: with the right rooms, then with the same rooms shuffled."""
    one, _ = played(stories)
    states, rooms = one.labelled.states[LAYER], one.labelled.questions.rooms
    with_copies(function)(one.new.model, LAYER, states, rooms)
    g = Generator().manual_seed(stories)
    shuffled = rooms[torch.randperm(len(rooms), generator=g)]
    read, _ = with_copies(function)(one.new.model, LAYER, states, shuffled)
    recovered = play.share(read(one.new.states[LAYER]) == one.new.questions.rooms)
    return {RECOVERED: Mark(recovered, 0.25, "a quarter", below=True)}


def flips(function: Callable[..., Any], stories: int) -> dict[str, Mark]:
    mine, rows = row(function, stories, 1)
    bound = rows["mean difference"].flips[0][0]
    return {FLIPPED: Mark(mine.flips[0][0], bound, "mean difference")}


def winner(function: Callable[..., Any], stories: int) -> dict[str, Mark]:
    """Prints the table, too."""
    mine, rows = row(function, stories, 1)
    print(f"{'':16} recovered  false claims  flips")
    for one in (*rows.values(), mine):
        shares = f"{one.recovered[0]:9.0%} {one.false_claims[0]:13.0%} {one.flips[0][0]:6.0%}"
        print(f"{one.method:16} {shares}")
    most, name = best(rows, lambda row: row.flips[0][0])
    return {FLIPPED: Mark(mine.flips[0][0], most + 0.1, f"{name}, plus 10 points")}


def hidden(g: Generator) -> Call:
    """One of some sets of stories, the same one in all cases."""
    return call(stories=int(torch.randint(SETS, ())))


# ------------------------------------------------------------------------------- wrong answers

GUESS, HONEST, MEAN, PROBE = "as a guess", "false claims", "mean difference", "the probe"
FORM, CONTROL, FLIPS, LEAGUE = "what a method is", "control", "flips", "the league"
SAYS = "return torch.where(sure > 0.4, room, -1)"
WRITES = "return x + directions[new]"
FIRST_LINE = "middle = states.mean(dim=0)\n"
DIRECTIONS = "directions = head - head.mean(dim=0)"

#: What is mistaken, the change of the solution in `text.py`, the case that rejects it.
WRONG = [
    ("the softmax is over the stories, not over the rooms", {"softmax(dim=-1)": "softmax(dim=0)"},
     FORM),
    ("read returns the scores of the rooms", {SAYS: "return scores"}, FORM),
    ("rooms are counted from 1", {SAYS: "return torch.where(sure > 0.4, room + 1, -1)"}, GUESS),
    ("write ignores the room", {WRITES: "return x + directions[0]"}, FORM),
    ("write says what read has found, not the new room",
     {WRITES: "return x + directions[read(x)]"}, FORM),
    ("write returns one state for all", {WRITES: "return (x + directions[new]).mean(dim=0)"}, FORM),
    ("write returns the states unchanged", {WRITES: "return x"}, FORM),
    ("write changes its states in place", {WRITES: "return x.add_(directions[new])"}, FORM),
    ("write returns float64", {WRITES: "return x + directions[new].double()"}, FORM),
    ("new states are centred by their own mean",
     {"scores = (x - middle)": "scores = (x - x.mean(dim=0))"}, FORM),
    ("a room for every story, by chance", {SAYS: "return torch.randint(8, (len(x),))"}, FORM),
    ("a room for every story, and always the same one",
     {SAYS: "return torch.zeros(len(x), dtype=torch.long)"}, HONEST),
    ("always abstains", {SAYS: "return torch.full((len(x),), -1)"}, HONEST),
    ("abstains unless it is nearly certain", {"sure > 0.4": "sure > 0.999"}, GUESS),
    ("the rooms of the labelled stories, in their order", {SAYS: "return rooms[: len(x)]"}, GUESS),
    ("the least likely room", {".max(dim=-1)": ".min(dim=-1)", "sure > 0.4": "sure < 0.4"}, GUESS),
    ("it learns from the states in one order and the rooms in another",
     {FIRST_LINE: FIRST_LINE + "    rooms = rooms.flip(0)\n"}, GUESS),
    ("it learns from nothing: random weights",
     {"weight = torch.linalg.solve(spread, (means - middle).T)  # (C, 8)":
      "weight = torch.randn(len(middle), 8)"}, GUESS),
    ("the nearest mean, by the plain distance",
     {SAYS: "return torch.cdist(x, means).argmin(dim=-1)"}, PROBE),
    ("the room that the head would say of this state",
     {SAYS: "return (x @ head.T).argmax(dim=-1)"}, CONTROL),
    ("what was learned first is kept for all later stories",
     {FIRST_LINE: "if hasattr(league_method, 'kept'):\n        return league_method.kept\n    "
      + FIRST_LINE, "return read, write": "league_method.kept = read, write\n    "
      "return read, write"}, CONTROL),
    ("write moves away from the room", {WRITES: "return x - directions[new]"}, FLIPS),
    ("write takes the direction of the next room", {WRITES: "return x + directions[new - 1]"},
     FLIPS, "no push in a wrong direction flips an answer, whichever it is"),
    ("write puts in the mean state of the room", {WRITES: "return means[new].clone()"}, FLIPS),
    ("write moves as little as the scores of read need",
     {WRITES: "goal = (means - middle) @ weight\n        return x + (goal[new] - (x - middle) @ "
      "weight) @ torch.linalg.pinv(weight)"}, FLIPS),
    ("write moves as little as the head needs for its usual scores",
     {WRITES: "goal = means @ directions.T\n        return x + (goal[new] - x @ directions.T) @ "
      "torch.linalg.pinv(directions.T)"}, LEAGUE),
]  # fmt: skip

CASES = (
    Case(FORM, hidden, "read and write take any number of states, and each state by itself",
         use=form, guard=True),
    Case(GUESS, hidden, "which room has a mean state like this one?", use=as_guess,
         teaching="the first step: it learns from states and rooms at all"),
    Case(HONEST, hidden, "abstain where no room stands out, and nowhere else", use=honest, points=2,
         teaching="silence and talk are no methods"),
    Case(MEAN, hidden, "a direction in which states differ anyway says little about rooms",
         use=better, points=2, teaching="the first method of the page"),
    Case(PROBE, hidden, "the probe has 128 weights for each room and 300 stories: what keeps such "
         "a fit from learning them by heart?", use=beyond, points=3,
         teaching="the best reader of the page"),
    Case(CONTROL, hidden, "what is read comes from the labels of this call alone", use=control,
         points=2),
    Case(FLIPS, hidden, "what must the state have more of, so that the model's head says the word?",
         use=flips, teaching="a first method that writes"),
    Case(LEAGUE, hidden, "a direction need not be one by which the rooms are read", use=winner,
         points=3, shows=True),
)  # fmt: skip

EXERCISE = Exercise(
    name="league_project", function="league_method", page="11_look_inside/7_league", minutes=60,
    difficulty=3,
    outcome="Build a method of interpretability, and measure it against others on known truth.",
    after=("control_probe",), reference=reference, cases=CASES, wrong=planted(WRONG),
    hints=(
        "Begin with the methods of the page: `lm_from_scratch.inside.league` has each of them in a "
        "few lines. Reading and writing are two tasks, so take the best for each.",
        "Reading: the states of one room differ from one another, far more in some directions than "
        "in others. How could a difference between rooms be measured in units of that spread?",
        "300 stories say little about the spread in 128 dimensions. What would you believe of it "
        "before you have seen any, and how could both be mixed?",
        "Writing: only the direction counts. After the last block the head multiplies the state "
        "with a row for each word. Which rows are the rooms', and what do they have in common that "
        "helps no room?",
    ),
)  # fmt: skip
