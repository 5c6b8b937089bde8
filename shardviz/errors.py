"""The one family of errors that shardviz raises for users, and their exit codes."""

from __future__ import annotations

EXIT_CLEAN = 0
EXIT_FINDINGS = 1
EXIT_USAGE = 2
EXIT_RANK_FAILED = 3
EXIT_BUG = 70
EXIT_INTERRUPTED = 130


class ShardvizError(Exception):
    """An error that a user can fix: a line that says what is wrong, and a hint what to do.

    Args:
        message: What is wrong, with the numbers in it. One line.
        hint: What to do about it. One line, empty if the message already says it.
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nHint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[type[ShardvizError], tuple[str, str]]:
        """Survive the pipe between a rank and its launcher with the hint intact."""
        return type(self), (self.message, self.hint)


class MeshError(ShardvizError):
    """A device mesh is impossible: a size below one, a repeated axis or a repeated rank."""


class LayoutError(ShardvizError):
    """Placements don't fit their mesh or their tensor."""


class NotationError(ShardvizError):
    """A layout in the notation can't be read."""


class DumpError(ShardvizError):
    """A dump can't be read or written."""


class ChangedError(DumpError):
    """A file of a dump was damaged or replaced after it was written: its checksum, rank or run differs."""


class RefusedError(DumpError):
    """A file of a dump is there and is not read: it is a link or no plain file, or may not be opened."""


class NoDumpError(DumpError):
    """A folder isn't a dump and contains none; it may be something else."""


class ProbeError(ShardvizError):
    """A probe doesn't exist, or the file isn't a probe."""


class RankError(ShardvizError):
    """A rank raised, died or hung, and the world was ended."""

    exit_code = EXIT_RANK_FAILED
