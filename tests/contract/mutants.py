"""`python -m tests.contract.mutants [NUMBER] [--seed S]`: does the contract notice when a judging line is wrong?

Draws lines of the judging rooms that the contract reaches, makes one mistake in each (a comparison turned, an axis
swapped, a tolerance times 100, a branch dropped), judges the rooms again until a verdict differs, and lists survivors.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.contract import store

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
JUDGING = ("shardviz/check", "shardviz/checkpoint", "shardviz/relate")
TURNED = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
TIMEOUT = 300.0


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        file: The file, from the root.
        line: The line.
        what: What was done to it.
        source: The whole file with the mistake in it.
    """

    file: str
    line: int
    what: str
    source: str


def main() -> int:
    """Print what became of each mutant; return 0 if at least nine in ten were caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", nargs="?", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if subprocess.run([sys.executable, "-m", "tests.contract", "compare"], cwd=ROOT, check=False).returncode:
        print("the contract differs already: no mutant can be told from that")
        return 2
    drawn = draw(reached(), args.number, random.Random(args.seed))
    caught = 0
    for number, mutant in enumerate(drawn, 1):
        is_caught = _is_caught(mutant)
        caught += is_caught
        state = "caught" if is_caught else "SURVIVED"
        print(f"{number:3d} {state:8s} {mutant.file}:{mutant.line} {mutant.what}", flush=True)
    print(f"{caught} of {len(drawn)} mutants caught")
    return 0 if caught * 10 >= len(drawn) * 9 else 1


def reached() -> dict[str, set[int]]:
    """Return the lines of the judging rooms that run when every case is judged, by file."""
    with tempfile.TemporaryDirectory(prefix="shardviz-mutants-") as made:
        found = Path(made, "lines")
        subprocess.run([sys.executable, "-m", "tests.contract.lines", str(found), *JUDGING], cwd=ROOT, check=True)
        lines: dict[str, set[int]] = {}
        for row in found.read_text().splitlines():
            file, _, line = row.rpartition(":")
            lines.setdefault(file, set()).add(int(line))
    return lines


def draw(lines: dict[str, set[int]], number: int, rng: random.Random) -> list[Mutant]:
    """Return so many mutants of lines that are reached, no two of one line."""
    mutants = [mutant for file in sorted(lines) for mutant in _mutants(file, lines[file])]
    rng.shuffle(mutants)
    chosen = {(mutant.file, mutant.line): mutant for mutant in reversed(mutants)}
    ordered = [mutant for mutant in mutants if chosen[mutant.file, mutant.line] is mutant]
    return ordered[:number]


def _mutants(file: str, lines: set[int]) -> Iterator[Mutant]:
    """Yield every mistake that can be made in some lines of a file."""
    text = (ROOT / file).read_text()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if getattr(node, "lineno", 0) in lines:
            for what, old, new in _edits(node, text):
                yield Mutant(file, node.lineno, what, _with(text, old, new))


def _edits(node: ast.AST, text: str) -> Iterator[tuple[str, ast.expr, str]]:
    """Yield the name of a mistake, the expression that it replaces, and the replacement."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in TURNED:
        turned = ast.Compare(node.left, [TURNED[type(node.ops[0])]()], node.comparators)
        yield "comparison turned", node, f"({ast.unparse(turned)})"
    if isinstance(node, ast.If | ast.IfExp) and ast.unparse(node.test) != "TYPE_CHECKING":
        yield "branch dropped", node.test, "False"
    if isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords:
        swapped = ast.Call(node.func, node.args[::-1], [])
        is_of_axes = any(word in ast.unparse(node).lower() for word in ("axis", "dim", "axes"))
        if is_of_axes and not isinstance(node.args[0], ast.Starred) and not isinstance(node.args[1], ast.Starred):
            yield "arguments swapped", node, ast.unparse(swapped)
    if isinstance(node, ast.Constant) and type(node.value) is float and node.value:
        yield "tolerance times 100", node, repr(node.value * 100)


def _with(text: str, node: ast.expr, new: str) -> str:
    """Return the text with other words in the place of an expression."""
    rows = text.splitlines(keepends=True)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    before = "".join(rows[: node.lineno - 1]) + rows[node.lineno - 1].encode()[: node.col_offset].decode()
    after = rows[node.end_lineno - 1].encode()[node.end_col_offset :].decode() + "".join(rows[node.end_lineno :])
    return before + new + after


def _is_caught(mutant: Mutant) -> bool:
    """Whether any room's verdicts differ, or judging ends in an error."""
    path = ROOT / mutant.file
    original = path.read_text()
    path.write_text(mutant.source)
    try:
        for room in _likely_first(mutant.file):
            command = [sys.executable, "-B", "-m", "tests.contract", "compare", "--room", room]
            try:
                if subprocess.run(command, cwd=ROOT, capture_output=True, timeout=TIMEOUT, check=False).returncode:
                    return True
            except subprocess.TimeoutExpired:
                return True
        return False
    finally:
        path.write_text(original)


def _likely_first(file: str) -> list[str]:
    first = ("checkpoints",) if "/checkpoint/" in file else ("dumps", "bugs", "places")
    rooms = store.rooms()
    return [*(room for room in first if room in rooms), *(room for room in rooms if room not in first)]


if __name__ == "__main__":
    raise SystemExit(main())
