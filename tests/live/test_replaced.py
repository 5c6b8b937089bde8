"""What is put in the place of something of torch goes again, and leaves what was there as it was."""

from __future__ import annotations

import pytest
from torch import UntypedStorage, distributed
from torch.distributed.tensor import DTensor, Shard

from shardviz.live.compat.modules import replaced


class Own:
    @staticmethod
    def static() -> int:
        return 1

    @classmethod
    def of_class(cls) -> type:
        return cls


class Inherits(Own):
    pass


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (distributed.ProcessGroup, "rank"),
        (distributed, "get_rank"),
        (UntypedStorage, "resize_"),
        (Shard, "_split_tensor"),
        (DTensor, "from_local"),
        (Own, "static"),
        (Own, "of_class"),
        (Inherits, "static"),
        (Inherits, "of_class"),
    ],
)
def test_it_is_there_as_before(owner: object, name: str) -> None:
    before = dict(vars(owner))
    with replaced(owner, name, lambda: 2):
        assert getattr(owner, name)() == 2
    assert dict(vars(owner)) == before


def test_what_is_not_there_is_not_replaced() -> None:
    with pytest.raises(AttributeError, match="no_such"), replaced(Own, "no_such", 1):
        pass
    assert not hasattr(Own, "no_such")
