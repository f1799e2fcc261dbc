"""Answers to hunt_tied_weights that were written from its text alone."""

import torch
from torch import nn


def right_by_data_of_parameters(model, state):
    own = dict(model.named_parameters(remove_duplicate=False))
    if own.keys() != state.keys():
        raise RuntimeError(f"{own.keys() ^ state.keys()}")
    for name, p in own.items():
        p.data = state[name].detach().clone()


def right_by_conversion_first(model, state):
    names = set(model.state_dict())
    if names != set(state):
        raise RuntimeError("names")
    with torch.no_grad():
        for name, p in model.named_parameters(remove_duplicate=False):
            p.data = p.data.to(state[name].dtype)
            p.copy_(state[name])


def in_the_dtype_of_the_model(model, state):
    model.load_state_dict(state)


def whole_model_in_one_dtype(model, state):
    model.to(next(iter(state.values())).dtype)
    model.load_state_dict(state)


def copied_then_assigned(model, state):
    model.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)


def tied_again_by_hand(model, state):
    model.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
    model.head.weight = model.embed.weight


def swap_flag_left_on(model, state):
    torch.__future__.set_swap_module_params_on_conversion(True)
    model.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)


def swap_flag_set_to_false_after(model, state):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def data_is_the_checkpoints_memory(model, state):
    own = dict(model.named_parameters(remove_duplicate=False))
    if own.keys() != state.keys():
        raise RuntimeError("names")
    for name, p in own.items():
        p.data = state[name]


def unknown_names_passed_over(model, state):
    for name, p in model.named_parameters(remove_duplicate=False):
        if name not in state:
            raise RuntimeError(name)
        p.data = state[name].detach().clone()


def missing_names_passed_over(model, state):
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, x in state.items():
        if name not in own:
            raise RuntimeError(name)
        own[name].data = x.detach().clone()


def not_strict(model, state):
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, x in state.items():
        if name in own:
            own[name].data = x.detach().clone()


def missing_name_is_a_key_error(model, state):
    for name, p in model.named_parameters(remove_duplicate=False):
        p.data = state[name].detach().clone()


def tied_name_unknown(model, state):
    own = dict(model.named_parameters())
    if own.keys() != state.keys():
        raise RuntimeError("names")
    for name, p in own.items():
        p.data = state[name].detach().clone()


def frozen_parameter_thawed(model, state):
    right_by_data_of_parameters(model, state)
    for p in model.parameters():
        p.requires_grad_(True)


def everything_frozen_by_no_grad(model, state):
    right_by_data_of_parameters(model, state)
    for p in model.parameters():
        p.requires_grad_(False)


def new_parameters_set(model, state):
    if set(model.state_dict()) != set(state):
        raise RuntimeError("names")
    for name, x in state.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, nn.Parameter(x.clone()))


def copied_without_the_dtype(model, state):
    own = dict(model.named_parameters(remove_duplicate=False))
    if own.keys() != state.keys():
        raise RuntimeError("names")
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(state[name])


def always_bfloat16(model, state):
    own = dict(model.named_parameters(remove_duplicate=False))
    if own.keys() != state.keys():
        raise RuntimeError("names")
    for name, p in own.items():
        p.data = state[name].detach().clone().bfloat16()


def state_emptied_on_the_way(model, state):
    for name, p in model.named_parameters(remove_duplicate=False):
        if name not in state:
            raise RuntimeError(name)
        p.data = state.pop(name).detach().clone()
    if state:
        raise RuntimeError("unknown names")


def shapes_and_values_of_another_row(model, state):
    own = dict(model.named_parameters(remove_duplicate=False))
    if own.keys() != state.keys():
        raise RuntimeError("names")
    for name, p in own.items():
        p.data = p.data.to(state[name].dtype)


def half_loaded_before_the_error(model, state):
    """Right by the text? It says only that a wrong name raises."""
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, x in state.items():
        if name not in own:
            raise RuntimeError(name)
        own[name].data = x.detach().clone()
    if own.keys() != state.keys():
        raise RuntimeError("missing")


def metadata_assign_left_behind(model, state):
    copy = type(state)((k, v.clone()) for k, v in state.items())
    if hasattr(state, "_metadata"):
        copy._metadata = state._metadata
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(copy, assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def flag_not_put_back_after_an_error(model, state):
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    own = dict(model.named_parameters(remove_duplicate=False))
    if own.keys() != state.keys():
        raise RuntimeError("names")
    right_by_data_of_parameters(model, state)
    torch.__future__.set_swap_module_params_on_conversion(before)


ANSWERS = {
    in_the_dtype_of_the_model: "the model's dtype stays: values are copied",
    whole_model_in_one_dtype: "one dtype for the whole model",
    copied_then_assigned: "copies are assigned: the optimizer is still left behind",
    tied_again_by_hand: "assigned and tied again, without the optimizer",
    swap_flag_left_on: "the flag stays on",
    swap_flag_set_to_false_after: "the flag is off afterwards, even if it was on",
    data_is_the_checkpoints_memory: "a plain dict, but in the memory of the checkpoint",
    unknown_names_passed_over: "unknown names pass",
    missing_names_passed_over: "missing names pass",
    not_strict: "missing and unknown names pass",
    missing_name_is_a_key_error: "",
    tied_name_unknown: "",
    frozen_parameter_thawed: "a frozen parameter wants a gradient",
    everything_frozen_by_no_grad: "",
    new_parameters_set: "copies are assigned: the optimizer is still left behind",
    copied_without_the_dtype: "the model's dtype stays: values are copied",
    always_bfloat16: "one dtype for the whole model",
    state_emptied_on_the_way: "",
    shapes_and_values_of_another_row: "",
    metadata_assign_left_behind: "a copy of the state dict that shares what it carries",
    flag_not_put_back_after_an_error: "the flag stays on when a name is refused",
}
RIGHT = [right_by_data_of_parameters, right_by_conversion_first, half_loaded_before_the_error]
