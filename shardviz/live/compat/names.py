"""Names that moved between versions of torch, and the names of parameters inside torch's wrappers."""

from __future__ import annotations

try:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
except ImportError:  # torch 2.4 and 2.5
    from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard  # type: ignore[attr-defined]
try:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # type: ignore[attr-defined]

__all__ = [
    "DTensor",
    "MixedPrecisionPolicy",
    "Partial",
    "Replicate",
    "Shard",
    "clean_name",
    "distribute_tensor",
    "fully_shard",
    "unit_of",
    "use_public_names",
]


def use_public_names() -> None:
    """Let a probe import DTensor and FSDP2 by their public names on torch 2.4 and 2.5 too, which lack some of them.

    Called before a probe is loaded, and nowhere else, because it adds names to torch's own modules. It changes nothing
    on torch 2.6 and newer. Tried on 2.4.1 and 2.13.0.
    """
    from torch.distributed import fsdp, tensor

    for home, names in (
        (fsdp, {"MixedPrecisionPolicy": MixedPrecisionPolicy, "fully_shard": fully_shard}),
        (tensor, {one.__name__: one for one in (DTensor, Partial, Replicate, Shard, distribute_tensor)}),
    ):
        for name in names.keys() - vars(home).keys():
            setattr(home, name, names[name])


def unit_of(name: str) -> str | None:
    """Return the module whose flat parameter has this name; None for the name of any other parameter.

    FSDP1 names it `_flat_param`: tried on torch 2.4.1, 2.13.0 and 2.15.0.
    """
    path, _, last = name.rpartition(".")
    return clean_name(path) if last == "_flat_param" else None


WRAPPERS = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")


def clean_name(name: str) -> str:
    """Drop what wrappers add to a name: FSDP1, torch.compile and activation checkpointing.

    DistributedDataParallel's `module` is a public name and stays.
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
