"""Other right answers to league_project."""

import torch
import torch.nn.functional as F

from lm_from_scratch.checkpoint.weights import load_shipped
from lm_from_scratch.text.story_grammar import ROOMS


def rows(model):
    """Of the head, one for each room."""
    tokenizer = load_shipped("worlds")[1]
    return torch.stack([model.lm_head.weight[tokenizer.encode(f" {r}")[0]] for r in ROOMS])


def by_whitening(model, layer, states, rooms):
    """The nearest mean, after the spread within rooms was made round."""
    means = torch.stack([states[rooms == r].mean(0) for r in range(8)])
    values, vectors = torch.linalg.eigh(torch.cov((states - means[rooms]).T).double())
    round_ = (vectors / (values + 0.15 * values.mean()).sqrt()).float()
    head = F.normalize(rows(model), dim=-1)

    def read(x):
        far = torch.cdist(x @ round_, means @ round_)
        return far.argmin(-1)

    return read, lambda x, new: x + 100 * (head[new] - head.mean(0))


def by_descent(model, layer, states, rooms):
    """Logistic regression that ends early."""
    mean, scale = states.mean(0), states.std(0)
    z, target = (states - mean) / scale, F.one_hot(rooms, 8).float()
    weight, bias = torch.zeros(states.shape[1], 8), torch.zeros(8)
    for _ in range(150):
        error = target - (z @ weight + bias).softmax(-1)
        weight += 0.1 * (z.T @ error / len(z) - 0.02 * weight)
        bias += 0.1 * error.mean(0)
    head = rows(model)

    def read(x):
        return ((x - mean) / scale @ weight + bias).argmax(-1)

    return read, lambda x, new: x + head[new] - (head.sum(0) - head[new]) / 7


def by_kernel(model, layer, states, rooms):
    """Ridge regression from products of states with states."""
    mean = states.mean(0)
    x, target = states - mean, F.one_hot(rooms, 8).float()
    products = x @ x.T
    penalty = 0.1 * products.trace() / x.shape[1] * torch.eye(len(x))
    found = torch.linalg.solve(products + penalty, target - target.mean(0))
    head = rows(model)

    def read(new):
        scores = (new - mean) @ x.T @ found + target.mean(0)
        top = scores.topk(2).values
        return torch.where(top[:, 0] - top[:, 1] > 0.01, scores.argmax(-1), -1)

    return read, lambda x, new: x + head[new] - head.mean(0)


def by_pieces(model, layer, states, rooms):
    """The mean of five fits, each without a fifth of the stories."""
    mean, fits = states.mean(0), []
    for piece in range(5):
        kept = torch.arange(len(states)) % 5 != piece
        x, y = states[kept] - mean, F.one_hot(rooms[kept], 8).float()
        penalty = 0.1 * x.square().sum() / x.shape[1] * torch.eye(x.shape[1])
        fits.append(torch.linalg.solve(x.T @ x + penalty, x.T @ (y - y.mean(0))))
    weight = torch.stack(fits).mean(0)
    head = rows(model)

    def write(x, new):
        moved = x.clone()
        for i, room in enumerate(new.tolist()):
            moved[i] += head[room] - head.mean(0)
        return moved

    return lambda x: ((x - mean) @ weight).argmax(-1), write


RIGHT = [by_whitening, by_descent, by_kernel, by_pieces]

WEAKER = "another method, perhaps a weaker one, and still above the marks"
SAME = "the same for a matrix, or for all rooms"
RARE = "few stories are as unsure as that"
SPREAD = "spread += 0.1 * spread.diagonal().mean() * torch.eye(len(spread))"
DIRECTIONS = "directions = head - head.mean(dim=0)"
SAYS = "return torch.where(sure > 0.4, room, -1)"
MOST = "sure, room = scores.softmax(dim=-1).max(dim=-1)"
WEIGHT = "weight = torch.linalg.solve(spread, (means - middle).T)"
SURVIVORS = {
    f"{SPREAD}: {SPREAD} => pass": WEAKER,
    f"{SPREAD}: 0.1 * spread.diagonal().mean() * torch.eye(len(spread)) => "
    "0.1 * spread.diagonal().mean()": WEAKER,
    f"{DIRECTIONS}: head - head.mean(dim=0) => head": WEAKER,
    f"{SPREAD}: 0.1 * spread.diagonal().mean() => 0.1 / spread.diagonal().mean()": WEAKER,
    f"{SPREAD}: 0.1 * spread.diagonal().mean() => 0.1": WEAKER,
    f"{DIRECTIONS}: head.mean(dim=0) => head.mean()": WEAKER,
    "spread = torch.cov((states - means[rooms]).T): states - means[rooms] => states": WEAKER,
    f"{SPREAD}: 0.1 => 0.2": WEAKER,
    f"{WEIGHT}: means - middle => means + middle": SAME,
    f"{WEIGHT}: means - middle => means": SAME,
    f"{SAYS}: sure > 0.4 => sure >= 0.4": RARE,
    f"{SAYS}: -1 => 1": RARE,
    f"{MOST}: -1 => 1": SAME,
    f"{SAYS}: 1 => 0": RARE,
    f"{MOST}: -1 => 1 (2)": SAME,
}
