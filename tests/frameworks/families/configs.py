"""The configurations of transformers that have a tensor-parallel plan, and the model that each is of."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache
from typing import Any

import transformers.models
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

PREFERRED = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "TextModel", "Model")
"""The ends of class names, the fullest model first."""


@cache
def with_plan() -> dict[str, type[Any]]:
    """Return the configurations with a plan, their own or that of a nested one, by class name."""
    return {name: one for name, one in _configurations().items() if has_own_plan(one) or _has_nested_plan(one)}


def has_own_plan(config: type[Any]) -> bool:
    """Whether a configuration has a plan itself."""
    return bool(config.base_model_tp_plan)


def _has_nested_plan(config: type[Any]) -> bool:
    nested = (one for one in (config.sub_configs or {}).values() if inspect.isclass(one) and one is not config)
    return any(issubclass(one, PreTrainedConfig) and (has_own_plan(one) or _has_nested_plan(one)) for one in nested)


def _configurations() -> dict[str, type[Any]]:
    found = {}
    root = transformers.models.__path__[0]
    for folder in pkgutil.iter_modules([root]):
        for file in pkgutil.iter_modules([f"{root}/{folder.name}"]):
            if file.name.startswith("configuration_"):
                module = importlib.import_module(f"transformers.models.{folder.name}.{file.name}")
                found.update(_of_module(module, PreTrainedConfig))
    return found


def _of_module(module: Any, base: type[Any]) -> dict[str, type[Any]]:
    """Return the classes of a base that a module defines, without aliases of them."""
    classes = ((name, one) for name, one in vars(module).items() if inspect.isclass(one) and issubclass(one, base))
    return {name: one for name, one in classes if one.__module__ == module.__name__ and one.__name__ == name}


def model_of(config: type[Any]) -> type[Any] | None:
    """Return the fullest model that has a configuration; None where transformers has none."""
    try:
        module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    except ModuleNotFoundError:
        return _registered(config)
    models = [
        one
        for name, one in _of_module(module, PreTrainedModel).items()
        if one.config_class is config and not name.endswith("PreTrainedModel")
    ]
    return min(models, key=_rank, default=None)


def _registered(config: type[Any]) -> type[Any] | None:
    """Return the model that a configuration without a module of its own is registered for, such as Llama's."""
    name = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return getattr(transformers, name) if name else None


def _rank(model: type[Any]) -> int:
    return next((at for at, end in enumerate(PREFERRED) if model.__name__.endswith(end)), len(PREFERRED))
