"""Weights that get what a rank sends during sharding, and the user's line that sends it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardviz.dump.records.step import FROM_ONE_RANK
from shardviz.dump.records.tensors import SentRecord
from shardviz.live.lines.frames import user_line
from shardviz.live.step.comms import collective_name
from shardviz.live.step.running import tensors_in
from shardviz.live.step.unread import memory_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardviz.live.capture.locals import Local


class Sends(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows what is broadcast or scattered, and into which memory it is copied."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sent: dict[int, tuple[str, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        op = collective_name(func)
        if op in FROM_ONE_RANK:
            line = user_line()
            place = f"{line.file}:{line.line}" if line is not None else ""
            self._sent |= dict.fromkeys(map(memory_of, tensors_in(args[:1])), (op, place))
        elif not op and self._sent:
            self._follow(str(func), list(tensors_in(args)), returned)
        return returned

    def _follow(self, name: str, given: list[torch.Tensor], returned: Any) -> None:
        """Note that a copy has what was sent, and that memory that is new or written over has not."""
        if "copy_" in name and len(given) > 1:
            source, target = self._sent.get(memory_of(given[1])), memory_of(given[0])
            self._sent.pop(target, None)
            if source is not None:
                self._sent[target] = source
        elif isinstance(returned, torch.Tensor):
            is_written = name.rpartition(".")[0].endswith("_")
            if is_written or memory_of(returned) not in map(memory_of, given):
                self._sent.pop(memory_of(returned), None)

    def records(self, locals_: Iterable[Local]) -> Iterator[SentRecord]:
        """Yield the tensors that hold what was sent."""
        for local in locals_:
            op, place = self._sent.get(memory_of(local.values), ("", ""))
            if place:
                yield SentRecord(local.name, op, place)
