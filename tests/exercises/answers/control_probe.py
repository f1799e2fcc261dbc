"""Other right answers to control_probe."""

import torch


def by_matrix(states, labels, words, drawn, held_out, n_classes):
    """The nearest mean is a linear probe: scores z M - |M|^2 / 2."""
    train, test = states[~held_out], states[held_out]
    mean, scale = train.mean(0), train.std(0, unbiased=False)
    a, b = (train - mean) / scale, (test - mean) / scale
    shares = []
    for y in (labels, drawn[words]):
        one_hot = torch.nn.functional.one_hot(y[~held_out], n_classes).double()
        M = one_hot.T @ a / one_hot.sum(0)[:, None]
        scores = b @ M.T - (M * M).sum(1) / 2
        shares.append((scores.argmax(1) == y[held_out]).sum().item() / len(b))
    return {"accuracy": shares[0], "control": shares[1], "selectivity": shares[0] - shares[1]}


def by_loop(states, labels, words, drawn, held_out, n_classes):
    """State by state."""
    keep = [i for i, held in enumerate(held_out.tolist()) if not held]
    rest = [i for i, held in enumerate(held_out.tolist()) if held]
    mean = sum(states[i] for i in keep) / len(keep)
    spread = (sum((states[i] - mean) ** 2 for i in keep) / len(keep)).sqrt()
    z = [(state - mean) / spread for state in states]
    task = [drawn[word].item() for word in words]
    results = []
    for y in (labels.tolist(), task):
        means = [torch.stack([z[i] for i in keep if y[i] == c]).mean(0) for c in range(n_classes)]
        right = 0
        for i in rest:
            nearest = min(range(n_classes), key=lambda c: (z[i] - means[c]).norm().item())
            right += nearest == y[i]
        results.append(right / len(rest))
    return {
        "selectivity": results[0] - results[1], "accuracy": results[0], "control": results[1]
    }  # fmt: skip


def by_sums(states, labels, words, drawn, held_out, n_classes):
    """Sums of classes by index_add, and distances by cdist."""
    train = ~held_out
    mean = states[train].mean(0, keepdim=True)
    z = (states - mean) / states[train].sub(mean).square().mean(0).sqrt()

    def share(y):
        sums = torch.zeros(n_classes, z.shape[1], dtype=z.dtype).index_add(0, y[train], z[train])
        means = sums / torch.bincount(y[train], minlength=n_classes)[:, None]
        found = torch.cdist(z[held_out], means, compute_mode="donot_use_mm_for_euclid_dist")
        return float((found.argmin(1) == y[held_out]).double().mean())

    a, b = share(labels), share(drawn.index_select(0, words))
    return dict(accuracy=a, control=b, selectivity=a - b)


def by_scales(states, labels, words, drawn, held_out, n_classes):
    """Nothing is standardised: differences to a mean are weighted instead."""
    x, new = states[~held_out], states[held_out]
    weight = 1 / x.var(0)
    found = {}
    for name, task in {"accuracy": labels, "control": drawn.gather(0, words)}.items():
        y, true = task[~held_out], task[held_out]
        means = torch.stack([x[y == c].mean(0) for c in range(n_classes)])
        distance = ((new[:, None, :] - means[None]) ** 2 * weight).sum(2)
        found[name] = torch.eq(distance.min(1).indices, true).double().mean().item()
    return found | {"selectivity": found["accuracy"] - found["control"]}


RIGHT = [by_matrix, by_loop, by_sums, by_scales]

MOVED = "which mean is the nearest does not change when all states are moved by one vector"
SURVIVORS = {
    "mean, scale = (fitted.mean(dim=0), fitted.std(dim=0)): fitted.mean(dim=0) => "
    "fitted.mean()": MOVED,
    "mean, scale = (fitted.mean(dim=0), fitted.std(dim=0)): fitted.mean => fitted.sum": MOVED,
    "z = (states - mean) / scale: states - mean => states + mean": MOVED,
    "z = (states - mean) / scale: states - mean => states": MOVED,
}
