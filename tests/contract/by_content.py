"""`python -m tests.contract.by_content`: the room `contents`, of small checkpoints without a common name and no map.

What `by_map` converts by a map is compared without one: alone, in layers that are numbered alike and in layers that are
counted from 1 or skip a number, rightly and with a slip, in one dtype and in two, and with a twin of one tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.contract import store
from tests.contract.by_map import conversions, saved
from tests.contract.judge import record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.contract.by_map import Array, Conversion, Tensors

ROOM = "contents"
REST = {"norm": np.linspace(1, 2, 7, dtype=np.float32), "bias": np.linspace(-3, 1, 5, dtype=np.float32)}
NUMBERS = {"alike": (0, 1, 2), "from 1": (1, 2, 3), "with a gap": (0, 2, 5)}
"""How the other side numbers three layers."""


def sides(conversion: Conversion, right: Array, numbers: tuple[int, ...]) -> tuple[Tensors, Tensors]:
    """Return what both checkpoints have: layers, of which each has the numbers of the first times its place."""
    first, second = dict(REST), {f"other.{name}.{name}": part for name, part in REST.items()}
    for at, number in enumerate(numbers):
        first[f"layers.{at}.w" if len(numbers) > 1 else "w"] = right * np.float32(at + 1)
        for name, part in conversion.sources.items():
            second[f"h.{number}.{name}.x" if len(numbers) > 1 else f"{name}.x"] = part * np.float32(at + 1)
    return first, second


def pairs() -> Iterator[tuple[str, bytes, bytes]]:
    """Yield the name of a pair of checkpoints, and both."""
    for number, conversion in enumerate(conversions()):
        slip = next(iter(conversion.slips.items()), ("halved", conversion.right / 2))
        for what, right in {"right": conversion.right, slip[0]: slip[1]}.items():
            name = f"{number} {conversion.line} of {'x'.join(map(str, conversion.right.shape))}: {what}"
            first, second = sides(conversion, right, (0,))
            yield f"{name}, alone", saved(first), saved(second)
            if what == "right":
                yield f"{name}, in two dtypes", saved(first), saved(second, "BF16")
                twin = {**second, "twin.x": next(iter(conversion.sources.values()))}
                yield f"{name}, with a twin", saved(first), saved(twin)
            how = list(NUMBERS)[number % len(NUMBERS)]
            yield f"{name}, numbered {how}", *map(saved, sides(conversion, right, NUMBERS[how]))


def main() -> None:
    """Make the room, and judge it."""
    room = store.Room(ROOM)
    for at, (name, first, second) in enumerate(pairs()):
        files = [{"": first}, {"": second}]
        room.add_content(name, ("diff", "{0}.safetensors", "{1}.safetensors"), files[::-1] if at % 3 == 2 else files)
    record(room)


if __name__ == "__main__":
    main()
