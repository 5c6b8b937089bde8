"""The messages of widgets: which tensor, side, place, rank or pass the user chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.message import Message

if TYPE_CHECKING:
    from shardviz.dump.records.step import StageRecord
    from shardviz.picture.text.paint import Side


@dataclass
class TensorChosen(Message):
    """A tensor was chosen from the list: its entry and, where it is identical layers, which of its names."""

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
    """The cursor came to an element of the map: its index in the shape of the holders, which has two dims at least."""

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
    """A pass of a pipeline's schedule was chosen: its rank, and when it began, in forward passes of one stage."""

    rank: int
    record: StageRecord
    begin: int
