"""Parameters: what knows them beside the modules that have them."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardviz.live.compat.fsdp import sharded_by_fsdp

if TYPE_CHECKING:
    from torch import nn


def parameters_are_held(model: nn.Module) -> bool:
    """Whether hooks, optimizers or lists keep parameters that `to_empty` replaces.

    It replaces plain parameters. A parameter that wraps a tensor, such as a DTensor, stays the same object but loses
    its hooks, unless it is FSDP2's, which calls them itself.
    """
    by_fsdp = {id(parameter) for parameter in sharded_by_fsdp(model)}
    places = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) in by_fsdp:
                continue
            # Modules know it, and so do this loop and the call.
            is_replaced = not is_traceable_wrapper_subclass(parameter)
            if _is_hooked(parameter) or (is_replaced and sys.getrefcount(parameter) > places[id(parameter)] + 2):
                return True
    return False


def _is_hooked(parameter: Any) -> bool:
    """Whether a parameter has hooks, or its autograd node is kept by someone who may hook it.

    torch finds the node by a view of the parameter, which a DTensor whose placements are wrong refuses.
    `_backward_hooks`, `_post_accumulate_grad_hooks` and `_DisableTorchDispatch`, tried on torch 2.6.0, 2.13.0 and
    2.15.0.
    """
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return True
    with torch._C._DisableTorchDispatch():
        return parameter.requires_grad and sys.getrefcount(get_gradient_edge(parameter).node) > 1
