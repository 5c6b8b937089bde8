"""torch's placements as plain values: `Shard`, `Replicate`, `Partial` and `_StridedShard`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardviz.errors import LayoutError
from shardviz.text import counted

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the axis holds an equal copy."""

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Shard:
    """The dim is cut by `torch.chunk` along the axis."""

    dim: int

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """A dim cut into `split_factor` parts, each of which `torch.chunk` splits along the axis."""

    dim: int
    split_factor: int

    def __repr__(self) -> str:
        return f"_StridedShard({self.dim}, split_factor={self.split_factor})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank along the axis holds a contribution; the reduction `op` is still pending."""

    op: str = "sum"

    def __repr__(self) -> str:
        return "Partial()" if self.op == "sum" else f"Partial({self.op!r})"


Placement = Replicate | Shard | StridedShard | Partial

REDUCTIONS = ("sum", "avg", "max", "min", "product", "band", "bor", "bxor", "premul_sum")
"""The reductions of torch's `Partial`, and `premul_sum` of its collectives."""

_SPELLINGS: dict[re.Pattern[str], Callable[[re.Match[str]], Placement]] = {
    re.compile(r"Replicate\(\)"): lambda m: Replicate(),
    re.compile(r"Shard\(([0-9]{1,4})\)"): lambda m: Shard(int(m[1])),
    re.compile(r"_StridedShard\(([0-9]{1,4}), split_factor=([0-9]{1,9})\)"): lambda m: StridedShard(
        int(m[1]), int(m[2])
    ),
    re.compile(rf"Partial\((?:'({'|'.join(REDUCTIONS)})')?\)"): lambda m: Partial(m[1] or "sum"),
}


def parse_placement(text: str) -> Placement:
    """Read one placement as `str` writes it.

    Raises:
        LayoutError: The text is not a placement.

    Example:
        >>> parse_placement("_StridedShard(0, split_factor=4)").split_factor
        4
    """
    for pattern, build in _SPELLINGS.items():
        if match := pattern.fullmatch(text):
            return build(match)
    raise LayoutError(
        f"{text!r} is not a placement", "Replicate(), Shard(0), _StridedShard(0, split_factor=2) or Partial()"
    )


_FROM_END = re.compile("-[0-9]{1,4}")
_SHORT = {"R": "Replicate", "S": "Shard", "_S": "_StridedShard", "P": "Partial"}
_ITEM = re.compile(
    r"(?P<kind>Replicate|_StridedShard|Shard|Partial|_S|R|S|P)\s*(?:\((?P<arguments>[^()]*)\))?\s*(?:,|$|(?=[)\]]+$))\s*"
)


def are_placements(text: str) -> bool:
    """Whether a text means to be a tuple or list of placements."""
    return _ITEM.match(text.strip().lstrip("([ ")) is not None


def parse_placements(text: str, num_dims: int) -> tuple[Placement, ...]:
    """Read placements as code or torch prints them: `[Shard(dim=-1)]`, `(S(0), R)`.

    Args:
        num_dims: The tensor's dims, from whose end `Shard(-1)` counts.

    Raises:
        LayoutError: The text is not a list of placements, or one counts back beyond the first dim.

    Example:
        >>> print(*parse_placements("[Shard(dim=-1), R]", 2))
        Shard(1) Replicate()
    """
    inner = text.strip()
    if inner[:1] in ("(", "[") and inner[-1:] in (")", "]") and _ITEM.match(inner[1:].lstrip()):
        inner = inner[1:-1].strip()
    placements: list[Placement] = []
    while inner:
        item = _ITEM.match(inner)
        if item is None:
            return (*placements, parse_placement(inner))
        placements.append(parse_placement(_as_printed(item["kind"], item["arguments"] or "", num_dims)))
        inner = inner[item.end() :]
    return tuple(placements)


def _as_printed(kind: str, arguments: str, num_dims: int) -> str:
    """Bring one placement into the form that `parse_placement` reads."""
    kind = _SHORT.get(kind, kind)
    values = [part.rpartition("=")[2].strip().strip("'\"") for part in arguments.split(",") if part.strip()]
    if "Shard" in kind and values and _FROM_END.fullmatch(values[0]):
        if int(values[0]) + num_dims < 0:
            raise LayoutError(
                f"{kind}({values[0]}) on a tensor of {counted(num_dims, 'dim')}",
                f"-1 is its last dim, {-num_dims} its first",
            )
        values[0] = str(int(values[0]) + num_dims)
    if kind == "_StridedShard" and len(values) == 2:
        return f"{kind}({values[0]}, split_factor={values[1]})"
    if kind == "Partial" and values:
        return f"{kind}({values[0]!r})"
    return f"{kind}({', '.join(values)})"


def spell(placements: tuple[Placement, ...]) -> str:
    """Write placements as the tuple that torch takes.

    Example:
        >>> spell((Shard(0), Replicate())), spell((Shard(1),))
        ('(Shard(0), Replicate())', '(Shard(1),)')
    """
    return "(" + ", ".join(map(str, placements)) + ("," if len(placements) == 1 else "") + ")"
