"""Which collectives the user's own code calls while it shards a model: a world that does not exist answers none."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from shardviz.live.plan.forks import is_own


class Talks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes collectives that no library has called: here they send nothing, and what they return is not true."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note whether it is a collective that the user's code has called."""
        if getattr(func, "namespace", "") == "c10d" and "barrier" not in str(func):
            self._note()
        return func(*args, **(kwargs or {}))

    def _note(self) -> None:
        """Note who called the outermost function of torch's collectives that is running."""
        frames = list(traceback.extract_stack())
        first = next((at for at, one in enumerate(frames) if one.filename.endswith("distributed_c10d.py")), 0)
        callers = [one for one in frames[:first] if not one.filename.endswith("c10d_logger.py")]
        if callers and is_own(callers[-1].filename):
            one = callers[-1]
            self._calls[f"{frames[first].name} ({Path(one.filename).name}, line {one.lineno}: {one.line})"] = None

    @property
    def said(self) -> tuple[str, ...]:
        """What was called, a sentence each."""
        return tuple(
            f"parallelize() calls {call}: a plan sends nothing, so what it returns is not true, nor are layouts that "
            "depend on it"
            for call in self._calls
        )
