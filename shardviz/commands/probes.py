"""List the probes that can be run, one per line.

examples:
  shardviz probes
  shardviz probes --bugs
  shardviz probes --format json
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardviz import probe_files
from shardviz.errors import EXIT_CLEAN, EXIT_FINDINGS, ProbeError
from shardviz.text import printable
from shardviz.versions import package_version

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from rich.text import Text

    from shardviz.commands.common.parser import Parser
    from shardviz.picture.text.terminal import Terminal
    from shardviz.probe_files import Probe


MIN_SUMMARY = 30
"""Columns that a summary needs beside names and axes; with fewer it stands below them."""


def add_arguments(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("--bugs", action="store_true", help="run and score every recreated bug and every quiet probe")
    parser.add_format("text", "json")


def run(args: argparse.Namespace) -> int:
    """Print the probes, or run those of the bugs and print how each was named."""
    if args.bugs:
        return _run_bugs(args)
    from shardviz.commands.common.dumps import terminal_for, write_answer, write_json

    others, broken = probe_files.installed()
    probes = [*probe_files.shipped(), *others]
    if args.format == "json":
        write_json([_as_json(probe, package_version("shardviz")) for probe in probes])
    else:
        terminal = terminal_for(args.color)
        write_answer(_lines(probes, terminal), terminal)
    for error in broken.values():
        print(f"shardviz: warning: {printable(error.message)}", file=sys.stderr)
    return EXIT_CLEAN


def _as_json(probe: Probe, own_version: str) -> dict[str, Any]:
    """Return what is known of a probe without running it."""
    installed = bool(probe.module)
    return {
        "name": probe.name,
        "summary": probe.summary,
        "axes": probe.axes,
        "mesh": probe.mesh,
        "kinds": probe.kinds,
        "path": str(probe.path),
        "distribution": probe.name.partition("/")[0] if installed else "shardviz",
        "version": probe.version if installed else own_version,
    }


def _lines(probes: Sequence[Probe], terminal: Terminal) -> list[Text]:
    """Write a line for each probe; on a terminal, long summaries wrap in their column."""
    from shardviz.picture.text.terminal import DIM, line, pad, widest, wrapped

    names = widest(printable(probe.name) for probe in probes)
    axes = widest(", ".join(probe.axes) for probe in probes)
    indent = names + axes + 4
    width = terminal.width if sys.stdout.isatty() else sys.maxsize
    is_narrow = indent + MIN_SUMMARY > width
    lines = []
    for probe in probes:
        by = f" ({probe.name.partition('/')[0]} {probe.version})" if probe.version else ""
        name, on = pad(printable(probe.name), names), pad(", ".join(probe.axes), axes)
        head = line((name, "bold"), "  ", (on, DIM), "  ")
        first, indent = (line("    "), 4) if is_narrow else (head, indent)
        lines += [*([head] if is_narrow else []), *wrapped(printable(f"{probe.summary}{by}"), width, first, indent)]
    return lines


@dataclass(frozen=True)
class ProbeScore:
    """The findings of one probe, compared with those that it must give.

    Attributes:
        wanted: The kinds that it must give; empty for one that must stay quiet.
        given: The kinds that it gave.
    """

    name: str
    wanted: frozenset[str]
    given: frozenset[str]

    @property
    def is_right(self) -> bool:
        """Whether what was found is what had to be."""
        return self.wanted == self.given


def _total(scores: Sequence[ProbeScore]) -> dict[str, int]:
    """Count the probes of bugs, those that gave any finding and exactly theirs, and the kinds that are no probe's."""
    bugs = [score for score in scores if score.wanted]
    return {
        "bugs": len(bugs),
        "detected": sum(bool(score.given) for score in bugs),
        "named": sum(score.is_right for score in bugs),
        "false_alarms": sum(len(score.given - score.wanted) for score in scores),
    }


def _run_bugs(args: argparse.Namespace) -> int:
    """Run them all and print the table.

    Returns:
        0 if every bug is rightly named and nothing else is found, 1 otherwise.
    """
    from rich.text import Text

    from shardviz.commands.common.dumps import terminal_for, write_answer, write_json
    from shardviz.commands.common.streams import progress

    terminal = terminal_for(args.color)
    known = [probe for probe in probe_files.shipped() if probe.name.startswith(("bugs/", "quiet/"))]
    too_new = {probe.name: why for probe in known if (why := _too_new(probe))}
    wanted = [probe for probe in known if probe.name not in too_new]
    scores: list[ProbeScore] = []
    with progress(lambda: f"ran {len(scores)} of {len(wanted)} probes"):
        scores += map(_score, wanted)
    if args.format == "json":
        write_json(as_json(scores, too_new))
    else:
        write_answer([*_table(scores, terminal), *map(Text, too_new.values())], terminal)
    return EXIT_CLEAN if all(score.is_right for score in scores) else EXIT_FINDINGS


def _too_new(probe: Probe) -> str:
    """Say why a probe cannot be run with this torch; empty if it can."""
    try:
        probe_files.check_torch(probe)
    except ProbeError as error:
        return f"not run: {error.message}"
    return ""


def _score(probe: Probe) -> ProbeScore:
    from shardviz.check.run import check_dump
    from shardviz.dump.write import prepare_folder
    from shardviz.layout.mesh import Mesh
    from shardviz.live.job import ProbeJob

    with tempfile.TemporaryDirectory(prefix="shardviz-bugs-") as folder:
        dump = prepare_folder(Path(folder) / "dump")
        ProbeJob(probe, Mesh(probe.axes, probe.mesh), dump).launch()
        given = frozenset(finding.kind for finding in check_dump(dump).findings)
    return ProbeScore(probe.name, frozenset(probe.kinds), given)


def _table(scores: list[ProbeScore], terminal: Terminal) -> list[Text]:
    from shardviz.picture.text.terminal import BAD, DIM, GOOD, line

    width = max(len(score.name) for score in scores)
    lines = [line(("  " + "probe".ljust(width) + "  found", DIM))]
    for score in scores:
        glyph, style = (terminal.glyphs.good, GOOD) if score.is_right else (terminal.glyphs.error, BAD)
        given = ", ".join(sorted(score.given)) or "nothing"
        due = "" if score.is_right else f"   expected: {', '.join(sorted(score.wanted)) or 'nothing'}"
        lines.append(line((glyph, style), f" {score.name.ljust(width)}  {given}", (due, BAD)))
    bugs, detected, named, alarms = _total(scores).values()
    text = f"{detected} of {bugs} detected, {named} of {bugs} correctly named, {alarms} false alarms"
    return [*lines, line(""), line((text, GOOD if named == bugs and not alarms else BAD))]


def as_json(scores: Sequence[ProbeScore], not_run: Mapping[str, str]) -> dict[str, Any]:
    """Return how every probe came out and their total, with the reasons why some were not run."""
    probes = [
        {"name": one.name, "expected": sorted(one.wanted), "found": sorted(one.given), "right": one.is_right}
        for one in scores
    ]
    return {"probes": probes, "not_run": dict(not_run), **_total(scores)}
