"""Answers to hunt_tied_weights: other right ones, and wrong ones of a second person."""

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


def half_loaded_before_the_error(model, state):
    """The text says only that a wrong name raises, not what stands in the model then."""
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in state.items():
        if name not in own:
            raise RuntimeError(name)
        own[name].data = tensor.detach().clone()
    checked(model, state)


BY_DEEP_COPY = """\
    from copy import deepcopy
    from unittest.mock import patch

    with patch.object(torch.__future__, "_swap_module_params_on_conversion", True):
        model.load_state_dict(deepcopy(state), assign=True)
"""

RIGHT = [
    by_data, by_swaps, by_conversion, half_loaded_before_the_error,
    # a deep copy, and the flag by a patch
    {BODY: BY_DEEP_COPY},
]  # fmt: skip


def missing_name_is_a_key_error(model, state):
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.data = state[name].detach().clone()


def tied_name_is_unknown(model, state):
    if dict(model.named_parameters()).keys() != state.keys():
        raise RuntimeError("names")
    missing_name_is_a_key_error(model, state)


def frozen(model, state):
    by_data(model, state)
    model.requires_grad_(False)


def new_parameters(model, state):
    for name in checked(model, state):
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, nn.Parameter(state[name].clone()))


def state_is_emptied(model, state):
    for name, parameter in checked(model, state).items():
        parameter.data = state.pop(name).detach().clone()


def only_dtypes(model, state):
    for name, parameter in checked(model, state).items():
        parameter.data = parameter.data.to(state[name].dtype)


WRONG = [
    ("a missing name is a KeyError", missing_name_is_a_key_error),
    ("the name of the tied weight is unknown", tied_name_is_unknown),
    ("everything is frozen", frozen),
    ("copies are assigned: the optimizer is still left behind", new_parameters),
    ("the state is emptied on the way", state_is_emptied),
    ("dtypes are loaded, values are not", only_dtypes),
]  # fmt: skip
