"""The machine that reads a pickle: what is left to read, a stack, a memo, and a count of the memory that it takes."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Step: TypeAlias = "Callable[[Machine, Any], None]"
    Reader: TypeAlias = "Callable[[io.BytesIO], Any] | None"

MEMORY_PER_BYTE = 60
"""Bytes of memory that a byte of a pickle may take: what torch writes takes up to 41, a nested tuple 72."""

MEMORY_OF_ALL = 1 << 20
"""Bytes of memory that any pickle may take besides."""

MAX_MEMORY = 1 << 32
"""Bytes of memory that no pickle may take more than: metadata of 800,000 chunks, by this count."""

STOP = b"."
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
        state: What is set on it afterwards, nothing if nothing is.
    """

    kind: str
    args: Any
    state: Any = None

    def field(self, name: str) -> Any:
        """Return one of the attributes that are set on it, None if it is not set."""
        return self.state.get(name) if type(self.state) is dict else None


class Machine:
    """The state of reading one pickle: what is left to read, the stack, the marks and the memo."""

    def __init__(self, data: bytes) -> None:
        self._stream = io.BytesIO(data)
        self.spent = 0
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    @property
    def at(self) -> int:
        """How many bytes were read."""
        return self._stream.tell()

    def run(self, steps: Mapping[bytes, tuple[Step, Reader]]) -> Any:
        """Follow the opcodes to the end, and return what is on top of the stack.

        Args:
            steps: For each opcode what it does, and what reads its argument.
        """
        stream = self._stream
        while (opcode := stream.read(1)) != STOP:
            if opcode not in steps:
                raise RefusedError(f"opcode {opcode!r}, which checkpoints do not use") if opcode else ValueError
            step, read = steps[opcode]
            step(self, read(stream) if read else None)
        return self.stack.pop()

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
