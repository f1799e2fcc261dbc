"""Other right answers to hunt_tied_weights."""

import torch
from torch import nn

from lm_from_scratch.exercises.catalogue.hunt_tied_weights.checks import BODY


def checked(model, state):
    own = dict(model.named_parameters(remove_duplicate=False))
    if own.keys() != state.keys():
        raise RuntimeError(f"missing or unknown: {own.keys() ^ state.keys()}")
    return own


def by_data(model, state):
    """Other contents are poured into each parameter."""
    for name, parameter in checked(model, state).items():
        parameter.data = state[name].detach().clone()


def by_swaps(model, state):
    """Each parameter is swapped with one of its own making."""
    for name, parameter in checked(model, state).items():
        new = nn.Parameter(state[name].detach().clone(), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, new)


def by_conversion(model, state):
    """Each parameter gets its dtype first; the default then copies values."""
    checked(model, state)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = next(n for n, p in model.named_parameters() if p is parameter)
            parameter.data = parameter.data.to(state[full].dtype)
            assert getattr(module, name) is parameter
    model.load_state_dict(dict(state))


BY_DEEP_COPY = """\
    from copy import deepcopy
    from unittest.mock import patch

    with patch.object(torch.__future__, "_swap_module_params_on_conversion", True):
        model.load_state_dict(deepcopy(state), assign=True)
"""


RIGHT = [
    by_data, by_swaps, by_conversion,
    # a deep copy, and the flag by a patch
    {BODY: BY_DEEP_COPY},
]  # fmt: skip
