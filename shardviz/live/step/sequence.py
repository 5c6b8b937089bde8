"""The positions of the sequence that this rank has, for tokens, labels and masks, as a probe defines them.

Context parallel splits tokens, not weights, and may reorder them; labels and masks must be split in the same way. A
probe may define:

    sequence(mesh)             by name, the positions that this rank has: the result of passing torch.arange(length)
                               through the code that splits the batch. Labels are the positions of the tokens to
                               predict: {"labels": (positions, {"offset": 1, "ignore": -100})} says that the label of a
                               token is the next one, and that -100 stands where there is none
    SEQUENCE                   the dim that is the same sequence, by pattern over the names of parameters and buffers
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from shardviz.dump.records.tensors import Stamp
from shardviz.errors import ProbeError
from shardviz.live.capture.agreement import of_all_ranks
from shardviz.live.capture.locals import Local

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.live.capture.capture import Capture
    from shardviz.live.capture.stamp import Stamped


def add_sequence(stamped: Stamped, probe: ModuleType, mesh: DeviceMesh, capture: Capture) -> Stamped:
    """Capture the positions that this rank has, as ids. Every rank calls this.

    Args:
        stamped: The model's stamps; the ids of positions follow them.
        probe: The probe's module.
        mesh: The run's mesh, as torch's object.
        capture: The capture of this rank, to which the positions are added.

    Returns:
        The stamps, plus one for every name, as long as the sequence.

    Raises:
        ProbeError: `sequence(mesh)` did not return positions, or used the name of one of the model's tensors.
    """
    if not hasattr(probe, "sequence"):
        return stamped
    rows = _rows(probe.sequence(mesh))
    length = max(of_all_ranks(_highest(rows))) + 1
    positions = {name: row.positions(length) for name, row in rows.items()}
    positions |= {name: _filled(name, rows[name], positions, rows, length, capture) for name in rows}
    stamps = {stamp.name: stamp for stamp in stamped.stamps}
    first = max((stamp.first + torch.Size(stamp.shape).numel() for stamp in stamped.stamps), default=1)
    for name, held in positions.items():
        if name in stamps:
            raise ProbeError(
                f"sequence(mesh) returned {name!r}, which is the name of a tensor in the model", "choose another name"
            )
        stamps[name] = Stamp(name, first, (length,), "activation")
        capture.stamps = stamps
        capture.add_ids(Local(name, "activation", (length,), held), (held + first).cpu().numpy())
        first += length
    return replace(stamped, stamps=tuple(stamps.values()))


def sequence_dims(probe: ModuleType, stamped: Stamped) -> dict[str, int]:
    """Return the dim that is the sequence, by pattern over the names of stamped tensors."""
    dims = {stamp.name: 0 for stamp in stamped.stamps if stamp.role == "activation"}
    return dims | getattr(probe, "SEQUENCE", {})


@dataclass(frozen=True)
class Row:
    """What a rank has along the sequence under one name.

    Attributes:
        held: The positions, as the probe returned them.
        offset: How many positions further it looks: 1 for labels, which are the next tokens.
        ignore: The number that stands where it has no position.
    """

    held: torch.Tensor
    offset: int = 0
    ignore: int | None = None

    @property
    def is_label(self) -> bool:
        """Whether it is about other positions than those at which it stands."""
        return self.offset != 0 or self.ignore is not None

    @property
    def ignored(self) -> torch.Tensor:
        """Where it has no position."""
        return torch.zeros_like(self.held, dtype=torch.bool) if self.ignore is None else self.held == self.ignore

    def positions(self, length: int) -> torch.Tensor:
        """Return the positions at which it stands; they wrap around the ends as in torch.roll."""
        return (self.held - self.offset) % length if self.offset else self.held


def _highest(rows: Mapping[str, Row]) -> int:
    """Return the last position that this rank has; labels count only if nothing else says how long all is."""
    plain = [row.held for row in rows.values() if not row.is_label]
    of = plain or [row.held[~row.ignored] - row.offset for row in rows.values()]
    return max((int(held.max()) for held in of if held.numel()), default=-1)


def _filled(
    name: str, row: Row, positions: Mapping[str, torch.Tensor], rows: Mapping[str, Row], length: int, capture: Capture
) -> torch.Tensor:
    """Return a row's positions, with those of the neighboring tokens if it has none.

    A label is rightly missing if its token is at the end of the sequence; any other is reported as unchecked.
    """
    if not bool(row.ignored.any()):
        return positions[name]
    neighbor = next((one for one in rows if not rows[one].is_label and len(rows[one].held) == len(row.held)), None)
    if neighbor is None:
        capture.not_checked.append((name, f"its order along the sequence: it has no input that isn't {row.ignore}"))
        return torch.where(row.ignored, 0, positions[name])
    substitutes = positions[neighbor]
    expected = substitutes[row.ignored & (substitutes + row.offset >= 0) & (substitutes + row.offset < length)]
    if len(expected):
        what = (
            f"{len(expected)} of its {len(substitutes)} elements: {row.ignore} stands where the sequence has position"
        )
        capture.not_checked.append((name, f"{what} {int(expected[0]) + row.offset}"))
    return torch.where(row.ignored, substitutes, positions[name])


def _rows(returned: Any) -> dict[str, Row]:
    """Return the probe's sequence rows, labels after the tensors that they are compared with."""
    if not isinstance(returned, dict):
        raise ProbeError(
            f"sequence(mesh) returned {type(returned).__name__}", "return a dictionary of positions by name"
        )
    rows = {name: _row(name, held) for name, held in returned.items()}
    return dict(sorted(rows.items(), key=lambda item: item[1].is_label))


def _row(name: str, returned: Any) -> Row:
    """Return positions as a row of whole numbers, from 0 if nothing else is given."""
    held, options = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if (
        not isinstance(options, dict)
        or options.keys() - {"offset", "ignore"}
        or any(type(one) is not int for one in options.values())
    ):
        raise ProbeError(
            f"sequence(mesh) returned {options!r} with the positions of {name!r}",
            'say what labels are by whole numbers: (positions, {"offset": 1, "ignore": -100})',
        )
    if not torch.is_tensor(held) or held.is_floating_point() or held.numel() != max(held.shape, default=0):
        what = f"{held.dtype}{list(held.shape)}" if torch.is_tensor(held) else type(held).__name__
        raise ProbeError(
            f"sequence(mesh) returned {what} as {name!r}",
            "pass torch.arange(length) through your split of the batch, and return the result",
        )
    row = Row(held.detach().flatten().to(torch.int64), **options)
    real = row.held[~row.ignored]
    if real.numel() and int(real.min()) < 0:
        hint = "positions count from 0; for labels, name the value of a missing label: {'ignore': -100}"
        raise ProbeError(f"sequence(mesh) returned position {int(real.min())} in {name!r}", hint)
    return row
