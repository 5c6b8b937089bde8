"""Names, dtypes and shapes of a model without weights, from the function that builds it.

Needs torch; the model is built on the meta device, where it takes no memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardviz.errors import ProbeError
from shardviz.live.noting import load_file

if TYPE_CHECKING:
    from types import ModuleType

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape by name."""


def tensors_of(text: str) -> tuple[Tensors, dict[str, str]]:
    """Build a model and return its state dict's tensors, and tied names with their first.

    Args:
        text: `path/to/file.py`, `path/to/file.py:function` or the name of a probe.

    Raises:
        ProbeError: There is no such file, function or probe, or it does not return a module.
    """
    model = _build(text)
    tensors: Tensors = {}
    tied: dict[str, str] = {}
    firsts: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            tensors[name] = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
            first = firsts.setdefault(id(tensor), name)
            if first != name:
                tied[name] = first
    return tensors, tied


def _build(text: str) -> nn.Module:
    path, _, function = text.partition(":")
    module, build = (_module(Path(path)), function or "build") if path.endswith(".py") else _probe(text)
    if not callable(getattr(module, build, None)):
        names = [name for name, member in vars(module).items() if callable(member) and not name.startswith("_")]
        hint = f"name the function that returns the model: {path}:{names[0]}" if names else "define build()"
        raise ProbeError(f"{path} has no {build}()", hint)
    try:
        with torch.device("meta"):
            model = getattr(module, build)()
    except Exception:  # whatever reads values while it builds: it is built with values then
        try:
            model = getattr(module, build)()
        except Exception as error:
            hint = f"call {build}() by hand: its traceback shows where"
            raise ProbeError(f"{text}: {build}() raised {type(error).__name__}: {error}", hint) from error
    if not isinstance(model, nn.Module):
        raise ProbeError(f"{text}: {build}() returned {type(model).__name__}, not a module", "return the model")
    return model


def _probe(text: str) -> tuple[ModuleType, str]:
    from shardviz.live.probe import load_probe
    from shardviz.probe_files import find

    try:
        probe = find(text)
    except ProbeError as error:
        hint = "give a checkpoint, FILE.py:FUNCTION that builds the model, or a name from `shardviz probes`"
        hint = error.hint if error.hint.startswith("did you mean") else hint
        raise ProbeError(f"{error.message}, and no checkpoint is there", hint) from error
    return load_probe(probe.path, probe.build, probe.module), probe.build


def _module(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise ProbeError(f"{path} does not exist", "give the file that builds the model, a checkpoint, or a probe")
    try:
        return load_file(path, f"shardviz_model_{path.stem}")
    except Exception as error:
        raise ProbeError(f"{path} raised {type(error).__name__}: {error}", f"python {path} shows where") from error
