"""The messages of workers and widgets: a dump was read, and which tensor, place or rank the user chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.message import Message

if TYPE_CHECKING:
    from pathlib import Path

    from shardviz.check.diff import Difference
    from shardviz.check.report import Report
    from shardviz.checkpoint.records import Checkpoint
    from shardviz.dump.records.files import RunRecord
    from shardviz.dump.records.step import StageRecord
    from shardviz.errors import ShardvizError
    from shardviz.picture.text.paint import Side

    from .document import Document
    from .pairs import Compared


@dataclass
class Progressed(Message):
    """Rank files of a dump have been read."""

    path: Path
    read: int
    files: int

    def can_replace(self, message: Message) -> bool:
        """Let a newer count replace an older one."""
        return isinstance(message, Progressed)


@dataclass
class RunRead(Message):
    """A dump's `run.json` was read, and none of its ranks."""

    path: Path
    run: RunRecord


@dataclass
class DocumentRead(Message):
    """A dump was read, as far as its first rank or wholly, or checked."""

    document: Document


@dataclass
class OtherRead(Message):
    """The second dump was read, or checked."""

    document: Document


@dataclass
class DumpsCompared(Message):
    """Both dumps were compared."""

    difference: Difference


@dataclass
class JobCompared(Message):
    """The dump was compared with a checkpoint."""

    compared: Compared


@dataclass
class ReadFailed(Message):
    """A dump could not be read."""

    why: ShardvizError


@dataclass
class CheckpointOpened(Message):
    """A checkpoint was opened again."""

    checkpoint: Checkpoint


@dataclass
class CheckpointChecked(Message):
    """A checkpoint was checked."""

    report: Report


@dataclass
class TensorChosen(Message):
    """A tensor was chosen from the list.

    Attributes:
        entry: Its entry.
        name: Which of its names, where it is one of identical layers; empty for the first.
    """

    entry: int
    name: str = ""


@dataclass
class TensorOpened(Message):
    """The user asked for a tensor's map."""

    entry: int


@dataclass
class SideChosen(Message):
    """A side was chosen: claimed, held or their difference."""

    side: Side


@dataclass
class PlaceChosen(Message):
    """The cursor came to an element of the map.

    Attributes:
        place: Its index in the shape of the holders, which has at least two dims.
    """

    place: tuple[int, ...]


@dataclass
class PlaneTurned(Message):
    """The user asked for the next two dims of the tensor."""


@dataclass
class Zoomed(Message):
    """A map was zoomed to a level."""

    level: int


@dataclass
class RankChosen(Message):
    """A rank was chosen."""

    rank: int


@dataclass
class PassChosen(Message):
    """A pass of a pipeline's schedule was chosen.

    Attributes:
        rank: The rank that ran it.
        record: The pass.
        begin: When it began, in forward passes of one stage.
    """

    rank: int
    record: StageRecord
    begin: int
