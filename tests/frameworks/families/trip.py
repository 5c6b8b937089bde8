"""What ranks do: rank 0 alone builds and saves a family, then all of them load it under its plan and save it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed

import shardviz
from tests.frameworks.families.configs import model_of, with_plan
from tests.frameworks.families.shrinking import shrunk

BEFORE, ALONE, AFTER, DUMP = "before", "alone", "after", "loaded.shardviz"


def build(_world: object, name: str, folder: str) -> None:
    """Save a family with random weights, and once more as one process loads it."""
    kind, root = model(name), Path(folder)
    torch.manual_seed(0)
    built = kind(shrunk(with_plan()[name]))
    with torch.no_grad():
        for tensor in built.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    built.save_pretrained(root / BEFORE)
    kind.from_pretrained(root / BEFORE).save_pretrained(root / ALONE)


def load(_world: object, name: str, folder: str, own: str) -> None:
    """Load a family under its own plan, write down what each rank holds, and save it."""
    from transformers.distributed import DistributedConfig

    root, out = Path(folder), Path(folder) / own
    how = DistributedConfig(tp_size=distributed.get_world_size(), tp_plan="auto")
    loaded = model(name).from_pretrained(root / BEFORE, distributed_config=how)
    shardviz.capture(loaded, out / DUMP, reference=root / BEFORE)
    loaded.save_pretrained(out / AFTER)


def names(_world: object) -> list[str]:
    """Return the names of all families."""
    return list(with_plan())


def model(name: str) -> Any:
    """Return the model of a configuration.

    Raises:
        LookupError: transformers has none.
    """
    found = model_of(with_plan()[name])
    if found is None:
        raise LookupError(f"transformers has no model of {name}")
    return found
