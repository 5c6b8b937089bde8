"""Which modules and lines of a step `--trace` follows. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardviz.errors import ShardvizError

MODULES, LINES = "modules=", "lines="


@dataclass(frozen=True, slots=True)
class Followed:
    """Which modules are followed through a step.

    Attributes:
        pattern: What their names match, as of files: `layers.1.*`; empty if no module is followed.
        lines: The module whose lines are recorded, with those around the model; empty for the model itself, None for
            no lines.
    """

    pattern: str = "*"
    lines: str | None = None

    @classmethod
    def parse(cls, text: str, *, of_job: bool = False) -> Followed:
        """Read `all`, `off` or `modules=PATTERN`; of a job also `lines` or `lines=MODULE`.

        Raises:
            ShardvizError: It is none of these.
        """
        if of_job and f"{text}=".startswith(LINES):
            return cls(lines=text.partition("=")[2])
        if text in ("all", "off"):
            return ALL if text == "all" else NONE
        if text.startswith(MODULES) and text != MODULES:
            return cls(text.removeprefix(MODULES))
        ways = "all, off, modules=PATTERN or lines=MODULE" if of_job else "all, off or modules=PATTERN"
        example = "lines=layers.1" if of_job else "'modules=layers.1.*'"
        raise ShardvizError(f"--trace {text!r} is not {ways}", f"--trace all, or --trace {example}")

    def includes(self, name: str) -> bool:
        """Whether a module is followed; the model itself is, if any of its modules is."""
        return bool(self.pattern) and (not name or fnmatchcase(name, self.pattern))


ALL, NONE = Followed(), Followed("")
