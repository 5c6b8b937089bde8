"""The slowest tests of a run of pytest, from its `--junit-xml` or from what `--durations=0` printed."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MOST = 20
DURATION = re.compile(r"^\s*([\d.]+)s (?:setup|call|teardown)\s+(\S.*)$", re.M)


def slowest(file: Path, most: int = MOST) -> list[tuple[float, str]]:
    """Return the seconds of the slowest tests and their names, the slowest first.

    Args:
        file: What pytest wrote or printed.
        most: How many.

    Raises:
        ValueError: The file has no times of tests.
    """
    text = file.read_text(encoding="utf-8")
    seconds: dict[str, float] = {}
    try:
        for case in ElementTree.fromstring(text).iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            seconds[name] = seconds.get(name, 0.0) + float(case.get("time", 0))
    except ElementTree.ParseError:
        for taken, name in DURATION.findall(text):
            seconds[name] = seconds.get(name, 0.0) + float(taken)
    if not seconds:
        raise ValueError(f"{file}: neither the --junit-xml of pytest nor what it prints with --durations=0")
    return sorted(((taken, name) for name, taken in seconds.items()), reverse=True)[:most]
