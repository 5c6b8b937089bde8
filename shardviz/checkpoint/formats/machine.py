"""The machine that reads a pickle: what is left to read, a stack, a memo, and a count of the memory that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Steps: TypeAlias = "Mapping[int, Callable[[Machine], None]]"

MEMORY_PER_BYTE = 60
"""Bytes of memory that a byte of a pickle may take: what torch writes takes up to 41, a nested tuple 72."""

MEMORY_OF_ALL = 1 << 20
"""Bytes of memory that any pickle may take besides."""

MAX_MEMORY = 1 << 32
"""Bytes of memory that no pickle may take more than: metadata of 800,000 chunks, by this count."""

MAX_NAME = 200
"""Characters of the module and of the name of a type."""

STOP = ord(".")
"""The opcode that ends a pickle."""


class RefusedError(Exception):
    """A pickle has what no checkpoint needs."""


@dataclass(frozen=True, slots=True)
class Global:
    """A type or function that a pickle names.

    Attributes:
        name: Its module and name: `torch.float32`.
    """

    name: str


@dataclass(slots=True, eq=False)
class Made:
    """What a pickle says is made of a type and some arguments; nothing is made.

    Attributes:
        kind: The type's name; `storage` for what stands outside the pickle.
        args: Its arguments.
        state: What is set on it afterwards, nothing where nothing is.
    """

    kind: str
    args: Any
    state: Any = None

    def field(self, name: str) -> Any:
        """Return one of the attributes that are set on it, None where it is not set."""
        return self.state.get(name) if type(self.state) is dict else None


class Machine:
    """The state of reading one pickle: what is left to read, the stack, the marks and the memo."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.spent = 0
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self, steps: Steps) -> Any:
        """Follow the opcodes to the end, and return what is on top of the stack."""
        data = self.data
        while (opcode := data[self.at]) != STOP:
            self.at += 1
            step = steps.get(opcode)
            if step is None:
                raise RefusedError(f"opcode {opcode:#04x}, which checkpoints do not use")
            step(self)
        return self.stack.pop()

    def take(self, count: int) -> bytes:
        """Read bytes."""
        end = self.at + count
        if end > len(self.data):
            raise ValueError
        found = self.data[self.at : end]
        self.at = end
        return found

    def number(self, size: int) -> int:
        """Read a number without a sign."""
        if size == 1:
            self.at += 1
            return self.data[self.at - 1]
        return int.from_bytes(self.take(size), "little")

    def line(self) -> str:
        """Read up to the end of a line, which is near."""
        end = self.data.index(b"\n", self.at, self.at + MAX_NAME)
        found = self.data[self.at : end].decode()
        self.at = end + 1
        return found

    def spend(self, size: int) -> None:
        """Refuse a pickle whose objects take much more memory than the bytes read so far."""
        self.spent += size
        if self.spent > min(MEMORY_PER_BYTE * self.at + MEMORY_OF_ALL, MAX_MEMORY):
            most = f"{MEMORY_PER_BYTE} times its bytes, or {MAX_MEMORY:,} bytes"
            raise RefusedError(f"objects that take more memory than {most}")

    def since_mark(self) -> list[Any]:
        """Return what was put on the stack since the last mark."""
        found, self.stack = self.stack, self.marked.pop()
        return found
