"""What the verbs that read a dump share: reading with progress, writing the answer."""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from shardviz.commands.common.streams import Count, progress, reader_may_leave, talk, write_file
from shardviz.dump.dump import Dump, dump_of
from shardviz.dump.gather import read_parts
from shardviz.dump.read import is_dump, ranks_here, read_run
from shardviz.errors import DumpError, NoDumpError, ShardvizError
from shardviz.text import bytes_text, counted, listed, named_ranks, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from rich.text import Text

    from shardviz.check.report import Report
    from shardviz.picture.text.terminal import Terminal

MOST_WARNINGS = 8
"""Missing or damaged files that are named one by one."""

_NOT_WRITTEN = frozenset({".png", ".pdf", ".jpg", ".jpeg", ".gif", ".webp"})

_SOURCES = frozenset({".py", ".ipynb", ".md", ".toml", ".yaml", ".yml", ".sh", ".pt", ".pth", ".bin", ".safetensors"})
"""Files of a user's own, which an answer never replaces."""


def read_dump(*folders: Path, warns: bool = True) -> Dump:
    """Read a dump, or its parts as one; warn about damaged files on stderr, and read the rest.

    Args:
        warns: Whether there is a warning: a check reports each such file as a finding.

    Raises:
        DumpError: A folder is not a dump, or parts are not of one dump.
    """
    count = Count("read {done} of {of} ranks")
    with naming_checkpoints(*folders), progress(lambda: str(count)):
        files = read_parts(folders, strict=False, on_progress=count)
    if warns:
        _warn_of(list(files.damaged.values()))
    return dump_of(files)


def says_it_is_a_part(folder: Path) -> bool:
    """Say where a dump's other ranks are, if they were written on other machines' disks."""
    num_ranks, here = read_run(folder).num_ranks, ranks_here(folder)
    absent = sorted(set(range(num_ranks)) - set(here))
    if not absent:
        return False
    shown = printable(shlex.quote(os.path.relpath(folder)))
    talk(
        f"wrote {shown} with {len(here):,} of {num_ranks:,} ranks; {named_ranks(absent, MOST_WARNINGS)} wrote to other "
        f"machines: nothing is checked before the folders are together, by shardviz check {shown} OTHER.shardviz, or "
        f"shardviz gather {shown} OTHER.shardviz -o ALL.shardviz"
    )
    return True


@contextmanager
def naming_checkpoints(*folders: Path) -> Iterator[None]:
    """Name the checkpoints in a folder that is read as a dump and is none, nor has one in it."""
    try:
        yield
    except NoDumpError as error:
        from shardviz.checkpoint.open import hint_at_checkpoints

        folder = next(folder for folder in folders if not is_dump(folder))
        raise DumpError(error.message, hint_at_checkpoints(folder, error.hint)) from None


def _warn_of(damaged: list[str]) -> None:
    """Say which files are damaged and how: the first ones, and how many there are beside them."""
    for message in damaged[:MOST_WARNINGS]:
        talk(f"shardviz: warning: {printable(message)}")
    if (left := len(damaged) - MOST_WARNINGS) > 0:
        talk(f"shardviz: warning: {counted(left, 'more file')} of ranks cannot be read")


def checked(dump: Dump) -> Report:
    """Check all that a dump has."""
    from shardviz.check.run import report_on
    from shardviz.check.verdicts import num_of_model

    words = f"checking {counted(num_of_model(dump), 'tensor')} on {counted(len(dump.files.ranks), 'rank')}"
    with progress(lambda: words):
        return report_on(dump)


def terminal_for(color: str, output: Path | None = None) -> Terminal:
    """Return what the answer is written for: a file is like a pipe that takes every character."""
    from shardviz.picture.text.terminal import Terminal

    return Terminal.of(sys.stdout, color) if output is None else Terminal(color=color == "always")


def format_of(output: Path | None) -> str:
    """Return the format that a file's ending asks for; text if it asks for none."""
    ending = output.suffix.lower().lstrip(".") if output is not None else ""
    return {"svg": "svg", "html": "html", "htm": "html"}.get(ending, "text")


def refuse_other_files(output: Path | None) -> None:
    """Raise for an output file that is a bitmap or the user's own source, with what to do."""
    if output is not None and output.suffix.lower() in _NOT_WRITTEN:
        vectors, is_pdf = output.with_suffix(".svg"), output.suffix.lower() == ".pdf"
        how = f"rsvg-convert {'-f pdf ' * is_pdf}{vectors} -o {output.with_suffix('.pdf' if is_pdf else '.png')}"
        raise ShardvizError(
            f"{output}: pictures are written as SVG, not as {output.suffix[1:].upper()}",
            f"write it with -o {vectors}, then convert it: {how}, or open it in a browser or Inkscape",
        )
    if output is not None and output.suffix.lower() in _SOURCES and output.exists():
        raise ShardvizError(
            f"{output} exists, and shardviz writes no {output.suffix} files",
            f"name a file that ends in .txt, .svg, .html or .json: -o {output.with_suffix('.txt')}",
        )


def refuse_several(what: str, names: Iterable[str]) -> NoReturn:
    """Raise for an SVG of several tensors, with what they are."""
    hint = f"name one of {listed(map(printable, names), 4)}; or use --format html for all"
    raise ShardvizError(f"an SVG shows one tensor, and {what}", hint)


def write_answer(lines: Iterable[Text], terminal: Terminal, output: Path | None = None) -> None:
    """Write text to stdout or to a file.

    Raises:
        ShardvizError: The file cannot be written.
    """
    if output is None:
        with reader_may_leave():
            terminal.write(sys.stdout, lines)
    else:
        _write_file(terminal.render(lines), output)


def write_json(answer: object, output: Path | None = None) -> None:
    """Write an answer as JSON to stdout or to a file.

    Raises:
        ShardvizError: The file cannot be written.
    """
    write_markup(f"{json.dumps(answer, indent=1)}\n", output)


def write_report(
    report: Report, style: str, color: str, lines: Callable[[Terminal], Iterable[Text]], names: Sequence[str]
) -> None:
    """Write a report as lines of text, or for machines; the names are JUnit's test cases."""
    if style == "text":
        terminal = terminal_for(color)
        write_answer(lines(terminal), terminal)
        return
    from shardviz.picture.machine import report_github, report_json, report_junit

    written = {"json": report_json, "github": report_github}
    with reader_may_leave():
        sys.stdout.write(written[style](report) if style in written else report_junit(report, names))


def write_markup(text: str, output: Path | None, option: str = "-o") -> None:
    """Write SVG, HTML or JSON, which are UTF-8, to stdout or to a file.

    Args:
        option: The option that names the file.

    Raises:
        ShardvizError: The file cannot be written.
    """
    if output is None:
        with reader_may_leave():
            sys.stdout.flush()
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.buffer.write(text.encode("utf-8"))
            else:
                sys.stdout.write(text)
    else:
        _write_file(text, output, option)


def _write_file(text: str, output: Path, option: str = "-o") -> None:
    write_file(text, output, option)
    opened = "; open it in a browser" if output.suffix.lower() in (".html", ".htm", ".svg") else ""
    talk(f"wrote {printable(str(output))}, {bytes_text(len(text.encode('utf-8')))}{opened}")
