"""One mode for all that is watched of a step: an operator that goes through four modes takes twice as long."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from shardviz.live.compat import answered_alone
from shardviz.live.plan.step.memory import Memory, waits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import nn

    from shardviz.live.plan.step.choices import Choices
    from shardviz.live.step.comms import Comms


class Watched(Memory):  # type: ignore[no-untyped-call]
    """Follows storages while a model runs, records its collectives, and works out what its choices lead to.

    Args:
        model: The model.
        passes: The modules whose forwards are what is waited for.
        comms: Records collectives, and knows which module is running.
        buckets: Those of DistributedDataParallel.
        choices: Gives choices numbers; None where tensors have values.
    """

    def __init__(
        self,
        model: nn.Module,
        passes: Iterable[nn.Module],
        comms: Comms,
        buckets: Sequence[torch.Tensor] = (),
        choices: Choices | None = None,
    ) -> None:
        super().__init__(model, passes, comms, buckets)
        self._choices = choices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and see what it sends, chooses and makes."""
        if (answer := answered_alone(func, args)) is not None:
            return answer
        if _has_dtensor(tuple(types)):
            return NotImplemented  # then its operators on plain tensors come by, one after the other
        kwargs = kwargs or {}
        if self._only_shapes():
            return func(*args, **kwargs)
        self._refuse_freed(func, args)
        self._refuse_dtypes(func, args)
        self._comms.note(func, args, kwargs)
        if self._choices is not None and waits(func):
            return args[0]  # what `_followed_up` returns
        returned = func(*args, **kwargs) if self._choices is None else self._choices.run(func, args, kwargs)
        return self._followed_up(func, args, kwargs, returned)


@lru_cache(maxsize=256)
def _has_dtensor(types: tuple[type, ...]) -> bool:
    return any(issubclass(one, DTensor) for one in types)
