"""Which modules of a step `shardviz probe --trace` follows. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardviz.errors import ShardvizError

MODULES = "modules="


@dataclass(frozen=True, slots=True)
class Followed:
    """Which modules are followed through a step.

    Attributes:
        pattern: What their names match, as of files: `layers.1.*`; empty if no module is followed.
    """

    pattern: str = "*"

    @classmethod
    def parse(cls, text: str) -> Followed:
        """Read `all`, `off` or `modules=PATTERN`.

        Raises:
            ShardvizError: It is none of these.
        """
        if text in ("all", "off"):
            return ALL if text == "all" else NONE
        if text.startswith(MODULES) and text != MODULES:
            return cls(text.removeprefix(MODULES))
        raise ShardvizError(
            f"--trace {text!r} is not all, off or modules=PATTERN", "--trace all, or --trace 'modules=layers.1.*'"
        )

    def includes(self, name: str) -> bool:
        """Whether a module is followed; the model itself is, where any of its modules is."""
        return bool(self.pattern) and (not name or fnmatchcase(name, self.pattern))


ALL, NONE = Followed(), Followed("")
