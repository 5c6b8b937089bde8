"""The names of parameters inside torch's wrappers."""

from __future__ import annotations


def unit_of(name: str) -> str | None:
    """Return the module whose flat parameter has this name; else None.

    FSDP1 names it `_flat_param`: tried on torch 2.6.0, 2.13.0 and 2.15.0.
    """
    path, _, last = name.rpartition(".")
    return clean_name(path) if last == "_flat_param" else None


WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")


def clean_name(name: str) -> str:
    """Drop what wrappers add to a name: FSDP1, torch.compile and activation checkpointing.

    DistributedDataParallel's `module` is a public name and stays.
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
