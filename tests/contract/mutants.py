"""`python -m tests.contract.mutants [NUMBER] [--seed S ...]`: does the contract notice when a judging line is wrong?

Draws lines of the judging rooms that the contract reaches, makes one mistake in each (a comparison turned, axes
swapped, a tolerance times 100, a branch dropped), and judges the cases that run the line, each mutant in a process of
its own, until one's verdict differs. What no case notices survives: a case is missing, or the line does nothing. A
mutant that changes sentences and no verdict is of a line that words what is found, which the contract leaves out: it is
listed, and another one is drawn in its place.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.contract.judge import IN_MEMORY, PROCESSES
from tests.contract.reached import ROOT, DiffersError, Recorded, reached

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tests.contract.reached import Key, Reached

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
SYMMETRIC = re.compile(
    r"(min|max|gcd|lcm|isclose|array_equal|allclose|maximum|minimum|swapaxes|transpose|same_region|same_regions)\("
)
"""Calls whose two arguments may stand in either order."""

TIMEOUT = 60
"""Seconds for one case, which takes milliseconds: a loop that a mistake made endless is noticed."""


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
    """Print what became of each mutant; return 0 if at least nine in ten were caught with every seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", nargs="?", type=int, default=50)
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="only mutants of files with this in their path")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardviz-mutants-", dir=IN_MEMORY) as made:
        recorded = Recorded.in_folder(Path(made))
        try:
            run = reached(recorded, JUDGING)
        except DiffersError as error:
            print(f"the contract differs already: {error}")
            return 2
        print(f"{len(recorded.cases)} cases run {sum(map(len, run.lines.values()))} lines", flush=True)
        prepare(run)
        is_enough = [_try(recorded, run, args.number, seed, args.only) for seed in args.seed]
    return 0 if all(is_enough) else 1


def prepare(run: Reached) -> None:
    """Import what judging needs of others, and count the lines of constants as run."""
    _import_third_party(run.lines)
    add_constants(run.lines)


def _try(recorded: Recorded, run: Reached, number: int, seed: int, only: str) -> bool:
    """Print which mutants of a seed are caught; return whether enough are."""
    started = time.monotonic()
    rng = random.Random(seed)
    drawn = draw({file: set(lines) for file, lines in run.lines.items() if only in file}, rng)
    states: Counter[str] = Counter()
    while states["caught"] + states["SURVIVED"] < number and states.total() < len(drawn):
        first, end = states.total(), min(len(drawn), number + states["words"])
        for place, (state, case) in enumerate(fates(recorded, run, drawn[first:end], seed), first):
            states[state] += 1
            mutant = drawn[place]
            num_cases = len(run.lines[mutant.file][mutant.line])
            text = f"{place + 1:3d} {state:8s} {mutant.file}:{mutant.line} {mutant.what}; {num_cases} cases {case}"
            print(text.rstrip(), flush=True)
    num_judged = states["caught"] + states["SURVIVED"]
    seconds = time.monotonic() - started
    print(
        f"seed {seed}: {states['caught']} of {num_judged} mutants caught in {seconds:.0f} s; {states['words']} of words"
    )
    return states["caught"] * 10 >= num_judged * 9


def fates(recorded: Recorded, run: Reached, drawn: list[Mutant], seed: int) -> Iterator[tuple[str, str]]:
    """Yield of each mutant whether it is caught, survives or changes words alone, and the case that shows it."""
    global _shared
    _shared = recorded, run, drawn, seed
    with get_context("fork").Pool(PROCESSES, maxtasksperchild=1) as pool:
        yield from pool.imap(_fate, range(len(drawn)))


def add_constants(lines: dict[str, dict[int, list[Key]]]) -> None:
    """Add the lines of modules' constants, which count as run where a line that names the constant runs."""
    by_name: dict[str, set[Key]] = {}
    constants = {(file, number): name for file in lines for number, name in _constants(file)}
    wanted = set(constants.values())
    for file, found in lines.items():
        rows = (ROOT / file).read_text().splitlines()
        for number, keys in found.items():
            for name in wanted.intersection(re.findall(r"[A-Z_]{3,}", rows[number - 1])):
                by_name.setdefault(name, set()).update(keys)
    for (file, number), name in constants.items():
        if name in by_name:
            lines[file].setdefault(number, sorted(by_name[name]))


def _constants(file: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a module's constants, with their names."""
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            assert node.end_lineno is not None
            if isinstance(target, ast.Name):
                yield from ((number, target.id) for number in range(node.lineno, node.end_lineno + 1))


def draw(lines: Mapping[str, set[int]], rng: random.Random) -> list[Mutant]:
    """Return a mutant of each line that is reached and has any, in random order."""
    mutants = [mutant for file in sorted(lines) for mutant in mutants_of(file, lines[file])]
    rng.shuffle(mutants)
    chosen = {(mutant.file, mutant.line): mutant for mutant in reversed(mutants)}
    return [mutant for mutant in mutants if chosen[mutant.file, mutant.line] is mutant]


def mutants_of(file: str, lines: set[int]) -> Iterator[Mutant]:
    """Yield every mistake that can be made in some lines of a file."""
    text = (ROOT / file).read_text()
    for node in _nodes(text):
        if getattr(node, "lineno", 0) in lines:
            for what, old, new in _edits(node, text):
                yield Mutant(file, node.lineno, what, _with(text, old, new))


def mistakes_of(file: str) -> set[str]:
    """Return what is done to a file in all the mistakes that can be made in it."""
    text = (ROOT / file).read_text()
    return {what for node in _nodes(text) for what, _, _ in _edits(node, text)}


def _nodes(text: str) -> Iterator[Any]:
    """Yield the nodes of a file that may be mistaken: not the base of a power, which is mistaken as a whole."""
    tree = ast.parse(text)
    bases = {id(node.left) for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)}
    yield from (node for node in ast.walk(tree) if id(node) not in bases)


def _edits(node: ast.AST, text: str) -> Iterator[tuple[str, ast.expr, str]]:
    """Yield the name of a mistake, the expression that it replaces, and the replacement."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in TURNED:
        turned = ast.Compare(node.left, [TURNED[type(node.ops[0])]()], node.comparators)
        yield f"comparison turned: {ast.unparse(node)}", node, f"({ast.unparse(turned)})"
    if isinstance(node, ast.If | ast.IfExp) and ast.unparse(node.test) != "TYPE_CHECKING":
        yield f"branch dropped: if {ast.unparse(node.test)}", node.test, "False"
    if isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords:
        swapped = ast.Call(node.func, node.args[::-1], [])
        is_of_axes = any(word in ast.unparse(node).lower() for word in ("axis", "dim", "axes"))
        is_starred = any(isinstance(value, ast.Starred) for value in node.args)
        if is_of_axes and not is_starred and not SYMMETRIC.search(f"{ast.unparse(node.func)}("):
            yield f"arguments swapped: {ast.unparse(node)}", node, ast.unparse(swapped)
    if _is_tolerance(node):
        assert isinstance(node, ast.expr)
        written = ast.get_source_segment(text, node)
        yield f"tolerance times 100: {written}", node, f"({written}) * 100"


def _is_tolerance(node: ast.AST) -> bool:
    """Whether a node is a written float or power; 0 and 1 stand for nothing and for the whole, not for a tolerance."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and isinstance(node.left, ast.Constant):
        return not any(isinstance(inner, ast.Name | ast.Attribute | ast.Call) for inner in ast.walk(node.right))
    return isinstance(node, ast.Constant) and type(node.value) is float and node.value not in (0, 1)


def _with(text: str, node: ast.expr, new: str) -> str:
    """Return the text with other words in the place of an expression."""
    rows = text.splitlines(keepends=True)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    before = "".join(rows[: node.lineno - 1]) + rows[node.lineno - 1].encode()[: node.col_offset].decode()
    after = rows[node.end_lineno - 1].encode()[node.end_col_offset :].decode() + "".join(rows[node.end_lineno :])
    return before + new + after


def _in_turn(mutant: Mutant, run: Reached, rng: random.Random) -> list[Key]:
    """Return the cases that run a line, one of each test first, which differ more than those of one test."""
    keys = sorted(run.lines[mutant.file][mutant.line])
    rng.shuffle(keys)
    seen: dict[str, int] = {}
    turns = {}
    for key in keys:
        test = key[1].partition("[")[0]
        turns[key] = seen[test] = seen.get(test, 0) + 1
    return sorted(keys, key=turns.__getitem__)


_shared: tuple[Recorded, Reached, list[Mutant], int]


def _fate(number: int) -> tuple[str, str]:
    """Return whether a mutant is caught, and by which case.

    Runs in a fresh process, in which no judging module is imported yet.
    """
    recorded, run, drawn, seed = _shared
    mutant = drawn[number]
    replace_source(mutant)
    words = ""
    for key in _in_turn(mutant, run, random.Random(f"{seed} {number}")):
        try:
            with within_seconds():
                rows, printed = recorded.judge(key)
        except (Exception, TimeIsUp) as error:  # a mistake may raise anything
            return "caught", f"{' '.join(key)}: {type(error).__name__}"
        if rows != recorded.known[key]:
            return "caught", " ".join(key)
        if run.printed[key] and printed != run.printed[key]:
            words = words or " ".join(key)
    return ("words" if words else "SURVIVED"), words


class TimeIsUp(BaseException):
    """Judging does not end; nothing in shardviz catches this."""


@contextlib.contextmanager
def within_seconds() -> Iterator[None]:
    """Raise TimeIsUp if judging takes too long."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(TIMEOUT)
    try:
        yield
    finally:
        signal.alarm(0)


def _too_long(_signal: int, _frame: Any) -> None:
    raise TimeIsUp


def replace_source(mutant: Mutant) -> None:
    """Let this process import a mutant in place of its file."""
    get_code = SourceFileLoader.get_code
    path = str(ROOT / mutant.file)

    def of_mutant(self: SourceFileLoader, fullname: str) -> Any:
        return compile(mutant.source, path, "exec") if self.path == path else get_code(self, fullname)

    SourceFileLoader.get_code = of_mutant  # type: ignore[method-assign]


def _import_third_party(files: Iterable[str]) -> None:
    """Import here all that judging modules import and is not shardviz's, so that no mutant's process has to."""
    with get_context("fork").Pool(1) as pool:
        names = pool.apply(_imported_by, (sorted(files),))
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _imported_by(files: list[str]) -> list[str]:
    for file in files:
        importlib.import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    return [name for name in sys.modules if not name.startswith(("shardviz", "__"))]


if __name__ == "__main__":
    raise SystemExit(main())
