"""Draw a dump's tensors, or list a checkpoint's: what is held where.

Prints a table of all tensors, or a picture of the one that you name. With -o
it writes that tensor as SVG (by default the one with a finding), or the whole
run as an HTML page. `plain` after a shape marks a tensor without placements,
so each rank has its own.

examples:
  shardviz show tp_fsdp-2x4.shardviz
  shardviz show tp_fsdp-2x4.shardviz up.weight -o weight.svg
  shardviz show left_to_right_2d-2x2.shardviz -o finding.svg
  shardviz show tp_fsdp-2x4.shardviz -o run.html
  shardviz show tp_fsdp-2x4.shardviz --memory
  shardviz show mine-2.shardviz layers.0.mlp --step
  shardviz show checkpoints/step-1000 "*.wq.weight"
  shardviz show checkpoints/step-1000 layers.0.wq.weight -o files.svg
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardviz.errors import EXIT_CLEAN, ShardvizError
from shardviz.text import counted, did_you_mean, printable

if TYPE_CHECKING:
    import argparse

    from rich.text import Text

    from shardviz.check.report import Report
    from shardviz.check.step.lines.types import Table
    from shardviz.commands.common.parser import Parser
    from shardviz.dump.dump import Dump
    from shardviz.picture.model.step import StepTree
    from shardviz.picture.text.terminal import Terminal


FORMATS = ("text", "svg", "html", "json")


def add_arguments(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("dump", type=Path, metavar="DUMP", help="a dump's folder, or a checkpoint")
    parser.add_argument("tensor", nargs="?", metavar="TENSOR", help="its name, the end of it, or a pattern with *")
    parser.add_argument("--format", choices=FORMATS, help="default: by the ending of FILE, text without one")
    tables = parser.add_mutually_exclusive_group()
    tables.add_argument("--memory", action="store_true", help="the bytes of each rank, by role and tensor")
    tables.add_argument("--comms", action="store_true", help="the collectives of the step by axis")
    tables.add_argument(
        "--step",
        action="store_true",
        help="the step's modules as they ran, the first wrong one open; with a module's name its lines or its calls",
    )
    tables.add_argument("--schedule", action="store_true", help="a pipeline's schedule, and its bubble")
    parser.add_argument("--all", action="store_true", help="print every rank or chunk, however many there are")
    parser.add_output("FILE", "write to a file")


def run(args: argparse.Namespace) -> int:
    """Print the picture, or write it.

    Raises:
        ShardvizError: The dump or the tensor is not there, or the format cannot say what is asked for.
    """
    from shardviz.checkpoint.open import is_checkpoint
    from shardviz.commands.common.checkpoints import draw_checkpoint
    from shardviz.commands.common.dumps import format_of, refuse_other_files

    refuse_other_files(args.output)
    if args.memory or args.comms or args.schedule:
        _show_table(args)
        return EXIT_CLEAN
    if args.step:
        _show_step(args)
        return EXIT_CLEAN
    format_ = args.format or format_of(args.output)
    if format_ == "json":
        raise ShardvizError("--format json is for --step", "shardviz check DUMP --format json has the findings")
    if format_ != "text" and is_checkpoint(args.dump):
        draw_checkpoint(args.dump, args.tensor, format_, args.output)
    elif format_ == "svg":
        _show_svg(args.dump, args.tensor, args.output)
    elif format_ == "html":
        _show_html(args.dump, args.tensor, args.output)
    else:
        show(args.dump, args.tensor, args.color, all_ranks=args.all, output=args.output)
    return EXIT_CLEAN


def _show_step(args: argparse.Namespace) -> None:
    """Print a step's modules, or one module's calls or lines, as text or as JSON."""
    import json

    from rich.text import Text

    from shardviz.commands.common.dumps import checked, format_of, read_dump, terminal_for, write_answer
    from shardviz.picture.model.step import step_heats, step_tree
    from shardviz.picture.text.step import lines_lines, module_lines, step_lines

    if args.format not in (None, "text", "json"):
        raise ShardvizError("--step prints a step as text or json", "html has it on its page")
    if format_of(args.output) != "text":
        hint = f"-o {args.output.with_suffix('.txt')}, or leave --step out: the page has the step"
        raise ShardvizError(f"{args.output}: --step is text or json, not a picture", hint)
    _refuse_checkpoint(args.dump)
    dump, module = read_dump(args.dump), args.tensor
    terminal = terminal_for(args.color, args.output)
    answer: dict[str, Any] = {"schema": 1}
    if module is not None and (table := _lines_of(dump, module)) is not None:
        answer |= {"module": table.module, "lines": [row.to_json() for row in table.rows]}
        lines = lines_lines(table, terminal)
    else:
        tree = step_tree(dump, checked(dump).findings)
        heats = step_heats(dump) if tree.finding is not None and module is None else []
        calls = tree.roots if module is None else tree.within(_module_of(tree, module)).roots
        finding = tree.finding.to_json() if tree.finding is not None else None
        answer |= {"calls": [call.to_json() for call in calls], "first_wrong": finding}
        answer |= {"heat": [heat.to_json() for heat in heats]}
        lines = step_lines(tree, heats, terminal) if module is None else module_lines(tree, module, terminal)
    write_answer([Text(json.dumps(answer))] if args.format == "json" else lines, terminal, args.output)


def _lines_of(dump: Dump, module: str) -> Table | None:
    """Return a module's lines; None, after saying which module has lines, if they aren't kept."""
    from shardviz.check.step.lines.types import table_of

    table = table_of(dump)
    if table is None or f"{module}.".startswith(f"{table.module}."):
        return table
    print(
        f"lines are kept of the first wrong module: shardviz show {dump.files.path} {table.module} --step",
        file=sys.stderr,
    )
    return None


def _module_of(tree: StepTree, module: str) -> str:
    """Return the name of a module that the step called.

    Raises:
        ShardvizError: The step was not followed, or called no such module.
    """
    from shardviz.picture.text.step import NONE

    modules = {name for name, _ in tree.keys}
    if module in modules:
        return module
    if not modules:
        raise ShardvizError(f"nothing is known of {printable(module)}: {NONE}")
    raise ShardvizError(f"the step called no module {printable(module)}", did_you_mean(module, modules - {""}))


def _show_table(args: argparse.Namespace) -> None:
    """Print what a step took and sent."""
    from shardviz.commands.common.dumps import format_of, read_dump, terminal_for, write_answer
    from shardviz.picture.model.mesh import bytes_held, bytes_received
    from shardviz.picture.text.costs import comms_lines, memory_lines
    from shardviz.picture.text.meshes import heat_lines
    from shardviz.picture.text.step import schedule_lines

    if args.tensor is not None or args.format not in (None, "text"):
        raise ShardvizError(
            "--memory, --comms and --schedule print the whole dump as text", "leave TENSOR and --format out"
        )
    if format_of(args.output) != "text":
        hint = f"-o {args.output.with_suffix('.txt')}"
        raise ShardvizError(f"{args.output}: --memory, --comms and --schedule are text, not a picture", hint)
    _refuse_checkpoint(args.dump)
    dump = read_dump(args.dump)
    terminal = terminal_for(args.color, args.output)
    if args.memory:
        heat = heat_lines(dump.files.mesh, bytes_held(dump), terminal)
        lines = [*_plan_lines(dump, terminal), *heat, *memory_lines(dump, all_ranks=args.all)]
    elif args.comms:
        lines = [*heat_lines(dump.files.mesh, bytes_received(dump), terminal), *comms_lines(dump)]
    else:
        lines = schedule_lines(dump, terminal.width)
    write_answer(lines, terminal, args.output)


def _plan_lines(dump: Dump, terminal: Terminal) -> list[Text]:
    """Return the memory of a plan, which has activations without having any tensors of them."""
    if dump.files.planned is None:
        return []
    from shardviz.picture.text.plans import memory_lines
    from shardviz.picture.text.terminal import line
    from shardviz.plan.counting import PlanBytes

    return [*memory_lines(PlanBytes(dump.files.planned), terminal.width), line("")]


def _refuse_checkpoint(path: Path) -> None:
    """Refuse to show the step of a checkpoint."""
    from shardviz.checkpoint.open import is_checkpoint

    if is_checkpoint(path):
        raise ShardvizError(f"{path} is a checkpoint, which has no step", "leave it out, or give a dump of a run")


def _show_svg(folder: Path, pattern: str | None, output: Path | None) -> None:
    """Write one tensor as SVG: the named one, that of the only finding, or the only one."""
    from shardviz.commands.common.dumps import checked, read_dump, refuse_several, write_markup
    from shardviz.dump.dump import find_tensors
    from shardviz.picture.model.subject import of_tensor
    from shardviz.picture.svg.page import svg

    dump = read_dump(folder)
    report = checked(dump)
    candidates = find_tensors(dump, "*" if pattern is None else pattern)
    what = f"{counted(len(candidates), 'tensor')} of the dump match" if pattern else "no tensor is named"
    wrong = {finding.tensor for finding in report.findings} & dump.first_captured.keys()
    if pattern is None and wrong:
        candidates = [(name, tensor) for name, tensor in candidates if name in wrong]
        what = f"{len(wrong)} tensors have findings"
    if len(candidates) > 1:
        refuse_several(what, [name for name, _ in candidates])
    ((name, tensor),) = candidates
    write_markup(svg(of_tensor(dump, tensor, name, report)), output)


def _show_html(folder: Path, pattern: str | None, output: Path | None) -> None:
    """Write the whole run as a page."""
    if pattern is not None:
        raise ShardvizError(
            f"an HTML page shows the whole run, not only {pattern}", "leave it out, or use --format svg"
        )
    from shardviz.commands.common.dumps import checked, read_dump, write_markup
    from shardviz.commands.common.streams import progress
    from shardviz.picture.html.page import html

    dump = read_dump(folder)
    report = checked(dump)
    with progress(lambda: f"drawing {report.num_tensors:,} tensors on {report.num_ranks:,} ranks"):
        page = html(dump, report)
    write_markup(page, output)


def show(folder: Path, pattern: str | None, color: str, *, all_ranks: bool = False, output: Path | None = None) -> None:
    """Print a dump's tensors, or those that a pattern names, one picture each.

    Raises:
        DumpError: The folder is not a dump.
        ShardvizError: No tensor has that name, or the file cannot be written.
    """
    from shardviz.checkpoint.open import is_checkpoint
    from shardviz.commands.common.dumps import checked, read_dump, terminal_for, write_answer
    from shardviz.dump.dump import find_tensors
    from shardviz.picture.model.subject import of_tensor
    from shardviz.picture.text.page import page_lines
    from shardviz.picture.text.ranks import rank_lines, value_lines
    from shardviz.picture.text.terminal import line

    if is_checkpoint(folder):
        from shardviz.commands.common.checkpoints import show_checkpoint

        show_checkpoint(folder, pattern, color, all_chunks=all_ranks, output=output)
        return
    dump = read_dump(folder)
    terminal = terminal_for(color, output)
    if pattern is None:
        write_answer(overview(dump, terminal), terminal, output)
        return
    lines: list[Text] = []
    report = checked(dump)
    for name, tensor in find_tensors(dump, pattern):
        subject = of_tensor(dump, tensor, name, report)
        ranks = rank_lines(subject, terminal, all_ranks=all_ranks)
        numbers = value_lines(tensor, terminal, named=subject.marked, parts=subject.claims, all_ranks=all_ranks)
        lines += [*([line(""), line("")] if lines else []), *page_lines(subject, terminal), line(""), *ranks]
        lines += [line(""), *numbers] if numbers else []
    write_answer(lines, terminal, output)


def _of_no_tensor(dump: Dump, report: Report, terminal: Terminal) -> list[Text]:
    """Return the findings that no tensor's own picture shows, with what they are seen by."""
    from shardviz.picture.exhibits.of_finding import exhibit_of
    from shardviz.picture.text.ranks import exhibit_lines
    from shardviz.picture.text.report import headline
    from shardviz.picture.text.terminal import line

    lines: list[Text] = []
    for finding in report.findings:
        if finding.tensor not in dump.first_captured:
            seen_by = exhibit_of(dump, finding, report.laid_out)
            table = [line(""), *exhibit_lines(seen_by, terminal)] if seen_by else []
            lines += [*headline(finding, terminal), *table, line("")]
    return lines


def overview(dump: Dump, terminal: Terminal) -> list[Text]:
    """Return the dump's mesh, its tensors with verdicts, and findings about no single tensor."""
    from shardviz.check.verdicts import not_compared
    from shardviz.commands.common.dumps import checked
    from shardviz.picture.text.meshes import mesh_lines
    from shardviz.picture.text.report import step_results, summary_lines, table_lines
    from shardviz.picture.text.terminal import line

    report = checked(dump)
    files = dump.files
    lines = [
        line((f"mesh {files.mesh}", "bold"), f"  {counted(files.run.num_ranks, 'rank')}, torch {files.run.torch}"),
        *mesh_lines(files.mesh, terminal.width, terminal.glyphs, report.named_ranks),
        line(""),
        *table_lines(dump, report, terminal),
        line(""),
        *_of_no_tensor(dump, report, terminal),
        *summary_lines(report, terminal, step_results(dump), not_compared(dump)),
    ]
    if report.findings or report.not_checked:
        print(f"shardviz check {files.path} says why", file=sys.stderr)
    return lines
