"""Other right answers to topological_order."""

from collections import deque
from graphlib import TopologicalSorter

from lm_from_scratch.training.autograd import topological_order as package


def by_flags(root):
    """The package's way: each value is on the stack twice."""
    return package(root)


def by_counting(root):
    """From those without parents on: a child is ready when its last parent has come."""
    children, missing, waiting = {root: []}, {}, [root]
    while waiting:
        value = waiting.pop()
        parents = set(value.parents)
        missing[value] = len(parents)
        for parent in parents:
            if parent not in children:
                children[parent] = []
                waiting.append(parent)
            children[parent].append(value)
    order = [value for value, count in missing.items() if not count]
    for value in order:
        for child in children[value]:
            missing[child] -= 1
            if not missing[child]:
                order.append(child)
    return order


def by_library(root):
    """Python has one."""
    graph, queue = {}, deque([root])
    while queue:
        value = queue.popleft()
        if value not in graph:
            graph[value] = value.parents
            queue.extend(graph[value])
    return [*TopologicalSorter(graph).static_order()]


def by_children(root):
    """The other way round: the root first, then whoever has no child left; then turned."""
    left, seen = {}, [root]
    for value in seen:
        for parent in value.parents:
            if parent not in left:
                left[parent] = 0
                seen.append(parent)
            left[parent] += 1
    turned = [root]
    for value in turned:
        for parent in value.parents:
            left[parent] -= 1
            if left[parent] == 0:
                turned.append(parent)
    turned.reverse()
    return turned


def by_iterators(root):
    """Each value on the stack remembers at which of its parents it is."""
    order, seen, stack = [], {root}, [(root, iter(root.parents))]
    while stack:
        value, parents = stack[-1]
        for parent in parents:
            if parent not in seen:
                seen.add(parent)
                stack.append((parent, iter(parent.parents)))
                break
        else:
            order.append(value)
            stack.pop()
    return order


RIGHT = [by_flags, by_counting, by_library, by_children, by_iterators]

SURVIVORS = {}
