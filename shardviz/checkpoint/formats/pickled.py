"""Pickles read as data: a closed list of inert types, and nothing is imported, called or built for a file.

`pickle.Unpickler` with a narrow `find_class` runs no code either, but a few bytes make it allocate gigabytes (a memo
index), hash forever or overflow the stack (nested tuples as a key). This reader knows the opcodes that torch writes.
"""

from __future__ import annotations

from typing import Any

from shardviz.checkpoint.formats.machine import Machine, RefusedError
from shardviz.checkpoint.formats.opcodes import STEPS
from shardviz.dump.pause import collector_paused
from shardviz.errors import DumpError
from shardviz.text import printable

MAX_BYTES = 1 << 28
"""Bytes of a pickle: a checkpoint of a million chunks has fewer."""


SUBCLASS = "torch._utils._rebuild_wrapper_subclass"
"""How torch pickles a tensor of a type of its own, such as a quantized one of torchao: by code, which is not run."""


class UnknownTypeError(DumpError):
    """A pickle that names a type that is not a checkpoint's."""

    @property
    def is_subclass(self) -> bool:
        """Whether it is a tensor subclass, as quantized weights are."""
        return SUBCLASS in self.message


SHARDS = (b"torch.distributed.tensor", b"torch.distributed._tensor", b"torch.distributed._shard.sharded_tensor")
"""Modules of tensors that are split over ranks."""
NEAR = 256
"""Bytes behind a tensor subclass in which its own type is named, before those of the tensors that follow."""


def _what_is(data: bytes, at: int, error: RefusedError) -> tuple[str, str]:
    """Return what the type that is not known is, where that is known, and what to do."""
    if SUBCLASS not in str(error):
        return "", "write the checkpoint again with torch.distributed.checkpoint or safetensors"
    if any(module in data[at : at + NEAR] for module in SHARDS):
        fix = "save with torch.distributed.checkpoint, or what get_model_state_dict gives with full_state_dict=True"
        return ": one rank's parts of tensors, as DTensor and ShardedTensor", fix
    return "", "save quantized weights as safetensors; torchao has flatten_tensor_state_dict for it"


def read_pickle(data: bytes, where: str) -> Any:
    """Read a pickle as numbers, strings, lists, dicts, tuples, `Global` and `Made`.

    Args:
        data: The pickle.
        where: What to call it in messages.

    Raises:
        UnknownTypeError: It names a type that is not in `known_types.KNOWN`.
        DumpError: It is damaged.
    """
    if len(data) > MAX_BYTES:
        raise DumpError(f"{where} has {len(data):,} bytes, more than {MAX_BYTES:,}", "is it a checkpoint's metadata?")
    machine = Machine(data)
    try:
        with collector_paused():
            return machine.run(STEPS)
    except RefusedError as error:
        what, fix = _what_is(data, machine.at, error)
        raise UnknownTypeError(
            f"{where} is refused: byte {machine.at:,} has {printable(str(error))}{what}",
            f"nothing in it was run; {fix}",
        ) from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DumpError(f"{where} is damaged at byte {machine.at:,} of {len(data):,}", "copy it again") from error
