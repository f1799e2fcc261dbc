"""Other right answers to hunt_second_round."""

from lm_from_scratch.training.autograd import topological_order


def by_one_loss(parameters, points, loss_of, lr, rounds):
    """All points in one computation: the mean is a Value, too."""
    losses = []
    for _ in range(rounds):
        mean = sum(map(loss_of, points)) / len(points)
        for p in parameters:
            p.grad = 0.0
        mean.backward()
        for p in parameters:
            p.data -= lr * p.grad
        losses.append(mean.data)
    return losses


def by_set_back_after(parameters, points, loss_of, lr, rounds):
    """Set back before the first round, and after each move."""

    def set_back():
        for p in parameters:
            p.grad = 0

    set_back()
    losses = [0.0] * rounds
    for n in range(rounds):
        for point in points:
            (loss := loss_of(point)).backward()
            losses[n] += loss.data / len(points)
        for p in parameters:
            p.data += p.grad * -lr / len(points)
        set_back()
    return losses


def by_difference(parameters, points, loss_of, lr, rounds):
    """Slopes add up for ever; what a round has added is what moves."""
    losses = []
    while len(losses) < rounds:
        old = [p.grad for p in parameters]
        found = []
        for point in points:
            found.append(loss_of(point))
            found[-1].backward()
        for p, before in zip(parameters, old):
            p.data -= lr * (p.grad - before) / len(points)
        losses.append(sum(loss.data for loss in found) / len(found))
    return losses


def by_own_sums(parameters, points, loss_of, lr, rounds):
    """The slopes of each point by themselves, added in a list."""

    def slopes(loss):
        own = {loss: 1.0}
        for value in reversed(topological_order(loss)):
            for parent, slope in zip(value.parents, value.slopes):
                own[parent] = own.get(parent, 0.0) + own[value] * slope
        return [own.get(p, 0.0) for p in parameters]

    losses = []
    for _ in range(rounds):
        found = [loss_of(point) for point in points]
        sums = [sum(column) for column in zip(*map(slopes, found))]
        for p, total in zip(parameters, sums):
            p.data -= lr * total / len(points)
        losses += [sum(loss.data for loss in found) / len(points)]
    return losses


def by_recursion(parameters, points, loss_of, lr, rounds):
    """One round, and then the others."""
    if not rounds:
        return []
    total = 0.0
    for i, point in enumerate(points):
        loss = loss_of(point)
        if i == 0:
            list(map(lambda p: setattr(p, "grad", 0.0), parameters))
        loss.backward()
        total += loss.data
    for p in parameters:
        p.data -= lr / len(points) * p.grad
    return [total / len(points), *by_recursion(parameters, points, loss_of, lr, rounds - 1)]


RIGHT = [by_one_loss, by_set_back_after, by_difference, by_own_sums, by_recursion]

SURVIVORS = {}
