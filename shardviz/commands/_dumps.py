"""What the verbs that read a dump share: reading with progress, finding a tensor by name, writing the answer."""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shardviz.commands._progress import Count, progress
from shardviz.dump.read import read_dump
from shardviz.dump.tensors import model_of
from shardviz.errors import ShardvizError
from shardviz.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from rich.text import Text

    from shardviz.check.finding import Report
    from shardviz.dump.tensors import Model, Tensor
    from shardviz.picture.terminal import Terminal

_NOT_WRITTEN = frozenset({".png", ".pdf", ".jpg", ".jpeg", ".gif", ".webp"})


def read_model(path: Path) -> Model:
    """Read a dump; files that are damaged are said on stderr, and the rest is read.

    Raises:
        DumpError: The folder is no dump.
    """
    count = Count("read {done} of {of} ranks")
    with progress(lambda: str(count)):
        dump = read_dump(path, strict=False, on_progress=count)
    for message in dump.damaged.values():
        print(f"shardviz: warning: {printable(message)}", file=sys.stderr)
    return model_of(dump)


def checked(model: Model) -> Report:
    """Check all that a dump has."""
    from shardviz.check.run import check_model

    names = sum(len(tensor.names) for tensor in model.tensors)
    told = f"checking {names:,} tensors on {len(model.dump.ranks):,} ranks"
    with progress(lambda: told):
        return check_model(model)


def find_tensors(model: Model, pattern: str) -> list[tuple[str, Tensor]]:
    """Find tensors by their exact name, by a pattern with `*`, or by the end of a name that only one has.

    Returns:
        Names with their tensors, each name once, as it was captured first.

    Raises:
        ShardvizError: No name fits, or the end of a name fits several.
    """
    by_name: dict[str, Tensor] = {}
    for tensor in model.tensors:
        for name in tensor.names:
            by_name.setdefault(name, tensor)
    if pattern in by_name:
        return [(pattern, by_name[pattern])]
    if any(char in pattern for char in "*?["):
        found = [name for name in by_name if fnmatchcase(name, pattern)]
    else:
        found = [name for name in by_name if name.endswith(f".{pattern}")]
        if len(found) > 1:
            raise ShardvizError(
                f"{len(found)} tensors end in {pattern!r}: {_some(found)}", f"name one, or all of them as '*.{pattern}'"
            )
    if not found:
        raise ShardvizError(f"the dump has no tensor {pattern!r}", _meant(pattern, list(by_name)))
    return [(name, by_name[name]) for name in found]


def _meant(name: str, names: Sequence[str]) -> str:
    from difflib import get_close_matches

    of_module = [known for known in names if f".{name}." in f".{known}"]
    by_end = {known.rpartition(".")[2]: known for known in reversed(names)}
    close = (
        of_module[:1]
        or get_close_matches(name, names, n=1)
        or [by_end[end] for end in get_close_matches(name, by_end, n=1)]
    )
    return f"did you mean {printable(close[0])}?" if close else f"it has {_some(names)}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(printable, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3:,} more"


def terminal_for(colour: str, output: Path | None = None) -> Terminal:
    """Return what the answer is written for: a file is like a pipe that can say every character."""
    from shardviz.picture.terminal import Terminal

    return Terminal.of(sys.stdout, colour) if output is None else Terminal(colour=colour == "always")


def refuse_pixels(output: Path | None) -> None:
    """Refuse to write text or SVG into a file whose name says that it is made of pixels or pages.

    Raises:
        ShardvizError: It does.
    """
    if output is not None and output.suffix.lower() in _NOT_WRITTEN:
        hint = f"-o {output.with_suffix('.svg')}; browsers, inkscape and rsvg-convert make the other of it"
        raise ShardvizError(f"{output}: pictures are written as SVG, not as {output.suffix[1:].upper()}", hint)


def write_answer(lines: Iterable[Text], terminal: Terminal, output: Path | None = None) -> None:
    """Write text to stdout or to a file.

    Raises:
        ShardvizError: The file cannot be written.
    """
    if output is None:
        terminal.write(sys.stdout, lines)
    else:
        _write_file(terminal.render(lines), output)


def write_markup(text: str, output: Path | None) -> None:
    """Write SVG or HTML to stdout or to a file; characters that stdout cannot say become references.

    Raises:
        ShardvizError: The file cannot be written.
    """
    if output is None:
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "xmlcharrefreplace").decode(encoding))
    else:
        _write_file(text, output)


def _write_file(text: str, output: Path) -> None:
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ShardvizError(f"cannot write {output}: {error.strerror}", "choose another file with -o") from error
