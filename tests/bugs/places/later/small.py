"""One gradient that is off by a hundredth, which in bfloat16 is less than the rounding of two steps."""

from __future__ import annotations

from tests.bugs.places.by_hand import BY_HAND_TP
from tests.bugs.places.fault import NOTHING, Fault
from tests.bugs.places.later.halo import HALO


def _times(weight: str) -> tuple[tuple[str, str], ...]:
    return ((NOTHING, f"    layer.{weight}.register_hook(lambda grad: grad * 1.01)\n"),)


FAULTS = (
    Fault("a hundredth more of an up projection", BY_HAND_TP, _times("mlp.up.weight"), ("layers.1.mlp.up",), ("1.0",)),
    Fault("a hundredth more of a norm", BY_HAND_TP, _times("norm2.weight"), ("layers.1.norm2",), ("1.0",)),
    Fault("a hundredth more of keys", BY_HAND_TP, _times("attn.k.weight"), ("layers.1.attn.k",), ("1.0",)),
    Fault("a hundredth more of a convolution", HALO, _times("conv.weight"), ("layers.1.conv",), ("1.0",)),
)
