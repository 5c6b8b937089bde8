"""Shard a small model on real ranks and say where every weight is.

Writes a dump, and exits with 1 if there are findings. Under torchrun it joins
that job.

examples:
  shardviz probe tp_fsdp --mesh 2,4
  shardviz probe path/to/my_model.py --mesh fsdp=2,tp=4 -o mine.shardviz
  shardviz probe path/to/my_model.py --watch
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from shardviz import probe_files
from shardviz.commands.common.parser import Parser, count, seconds
from shardviz.commands.common.streams import progress, write_file
from shardviz.dump.write import RANK_FILE, SUFFIX, check_folder, is_earlier_run, replacing_folder
from shardviz.errors import EXIT_CLEAN, EXIT_USAGE, MeshError, ShardvizError
from shardviz.layout.mesh import Mesh, parse_mesh
from shardviz.layout.notation import write
from shardviz.live.job import JOINED_TIMEOUT, TASK, TIMEOUT, VALUES_LIMIT, ProbeJob
from shardviz.live.trace_modules import Followed
from shardviz.probe_files import Probe, is_shipped

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from shardviz.commands.common.watching import WatchedFiles
    from shardviz.dump.dump import Dump, Tensor
    from shardviz.dump.records.base import Moment
    from shardviz.live.world import World

LOG_LINE = re.compile(r"\[rank\d+\]:[IWE]\d{4} |$")
"""How a line of torch's log begins; or an empty one."""

QUESTION = "shardviz.check.run:modules_to_open"
"""The judge that rank 0 asks, by name: it is not imported unless a step goes wrong."""

PRELOADED = ("shardviz.live.probe",)
"""Modules that ranks find imported, beside torch."""


def add_arguments(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("probe", help="a name from `shardviz probes`, or path/to/file.py[:build_function]")
    parser.add_argument("--mesh", help="sizes of the mesh axes, 2,4 or fsdp=2,tp=4; default: the probe's own")
    parser.add_output("DIR", "the dump's folder; default: PROBE-2x4.shardviz")
    parser.add_force(
        "replace the folder, if it is a dump; not needed for the default folder and the same probe and mesh"
    )
    parser.add_argument(
        "--watch", action="store_true", help="run again whenever the file or a module that it imports is saved"
    )
    parser.add_argument(
        "--launch", choices=("fork", "spawn"), default="fork", help="how ranks are started; default: fork"
    )
    parser.add_argument("--backend", help="gloo (the default), nccl, which takes a GPU for each rank, or mpi")
    parser.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help=f"how long ranks may take; default: {TIMEOUT:g}, under torchrun {JOINED_TIMEOUT:g} for each collective",
    )
    parser.add_argument(
        "--values",
        type=count,
        default=VALUES_LIMIT,
        metavar="N",
        help=f"also write the values of shards of at most N elements; default: {VALUES_LIMIT}",
    )
    parser.add_argument(
        "--trace",
        default="all",
        metavar="WHICH",
        help="the modules that a step is followed through: all, off, or 'modules=layers.1.*'; default: all, which "
        "keeps at most 16 million numbers per rank and takes at most as long as the step itself",
    )
    parser.add_argument(
        "--save-test", type=Path, metavar="FILE", help="also write a pytest test that asserts what the probe saw"
    )
    parser.add_format("text", "json")
    parser.add_strict()


def run(args: argparse.Namespace) -> int:
    """Run the probe.

    Returns:
        0 if nothing is wrong, 1 if there are findings, 2 if nothing could be checked.
    """
    from shardviz.live import world

    Followed.parse(args.trace)
    joined = world.torchrun_world(args.backend)
    if args.watch:
        return _watch(args, joined)
    if joined is None:
        return _run_here(args)
    probe, mesh, folder = wanted(args, joined)
    return _run_joined(args, probe, mesh, folder)


def _watch(args: argparse.Namespace, joined: World | None) -> NoReturn:
    """Run the probe again and again.

    Raises:
        ShardvizError: It cannot be watched.
    """
    from shardviz.commands.common.watching import watch
    from shardviz.live import world

    if joined is not None:
        raise ShardvizError("--watch starts ranks again and again, but torchrun started these", "leave torchrun out")
    if args.save_test:
        raise ShardvizError("--save-test writes a test once, --watch runs a probe often", "leave --watch out")
    path = Path(args.probe.partition(":")[0])
    if path.suffix != ".py" or not path.exists():
        path = probe_files.find(args.probe).path
    world.prepare(args.launch, also=PRELOADED)
    with ending_at_signals():
        watch(path.resolve(), partial(_run_here, args))


def wanted(args: argparse.Namespace, joined: World | None = None) -> tuple[Probe, Mesh, Path]:
    """Return the probe, its mesh and its dump's folder; warn of names that look misspelled."""
    probe = probe_files.find(args.probe)
    probe_files.check_torch(probe)
    mesh = mesh_for(probe, args.mesh, joined.num_ranks if joined else None)
    if joined is None or joined.rank == 0:
        _say_names(args, probe, mesh)
    return probe, mesh, args.output or default_folder(probe, mesh)


def default_folder(probe: Probe, mesh: Mesh, ending: str = "") -> Path:
    """Return the folder of a probe's dump on a mesh, or of its plan, if nobody names one."""
    stem = probe.name.rpartition("/")[2] if probe.module else probe.path.stem
    return Path(f"{stem}-{'x'.join(map(str, mesh.shape))}{ending}{SUFFIX}")


def _may_replace(args: argparse.Namespace, probe: Probe, mesh: Mesh, folder: Path) -> bool:
    """Whether to replace the dump: with --force, or if it is an earlier one of the default name."""
    return args.force or (args.output is None and is_earlier_run(folder, probe.name, mesh))


def _run_here(args: argparse.Namespace, watched: WatchedFiles | None = None) -> int:
    """Run the probe on new ranks of this machine; with --watch, until one of its files changes."""
    from shardviz.live import world

    probe, mesh, folder = wanted(args)
    if args.save_test:
        check_file(args.save_test, force=args.force)
    force = _may_replace(args, probe, mesh, folder) or (watched is not None and folder in watched.written)
    check_folder(folder, force=force)
    world.prepare(args.launch, also=PRELOADED)
    with (
        ending_at_signals(),
        replacing_folder(folder, force=force) as unfinished,
        progress(lambda: _progress_text(unfinished, mesh.size)),
        watched.ending_when_overtaken() if watched else nullcontext(),
    ):
        _job(args, probe, mesh, unfinished, watched.notes if watched else None).launch(
            args.launch, backend=args.backend, timeout=args.timeout or TIMEOUT, on_output=_show_prints
        )
    code = _report(args, probe, mesh, folder, is_news=watched is None or folder not in watched.written)
    if watched is not None:
        watched.written.add(folder)
    return code


def _say_names(args: argparse.Namespace, probe: Probe, mesh: Mesh) -> None:
    """Warn about axes without names, and about names that look like misspelt hooks."""
    if not probe.axes and args.mesh and "=" not in args.mesh and not probe_files.is_shipped(probe):
        named = ",".join(f"NAME={size}" for size in mesh.shape)
        how = f"define AXES in {probe.path.name}, or write --mesh {named}"
        print(f"the mesh axes are called {', '.join(mesh.axes)}: to name them, {how}", file=sys.stderr)
    for name, hook in probe.misspelt:
        print(f"nothing uses {name} in {probe.path.name}: did you mean {hook}?", file=sys.stderr)


@contextmanager
def ending_at_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the command as Ctrl-C does, which leaves nothing half-written.

    They come of a cancelled job, `timeout`, or a terminal that is closed; `nohup` has SIGHUP ignored, and it stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ending = [
        signal_number
        for signal_number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(signal_number) != signal.SIG_IGN
    ]
    before = {
        signal_number: signal.signal(signal_number, lambda number, frame: sys.exit(128 + number))
        for signal_number in ending
    }
    try:
        yield
    finally:
        for signal_number, handler in before.items():
            signal.signal(signal_number, handler)


def _progress_text(folder: Path, num_ranks: int) -> str:
    written = sum(RANK_FILE.fullmatch(path.name) is not None for path in folder.iterdir())
    return f"{written:,} of {num_ranks:,} ranks have run the probe"


def mesh_for(probe: Probe, text: str | None, num_ranks: int | None = None) -> Mesh:
    """Return the mesh to run a probe on.

    Args:
        text: What the user asked for; None for the probe's own mesh, or two ranks per axis.
        num_ranks: The size of the job that is joined, if one is.

    Raises:
        MeshError: The text is not a mesh, or the mesh has other axes than the probe or another size than the job.
    """
    default = probe.mesh or (2,) * len(probe.axes or "x")
    mesh = parse_mesh(text or ",".join(map(str, default)), probe.axes)
    if probe.axes and set(mesh.axes) != set(probe.axes):
        wanted, given = ", ".join(probe.axes), ", ".join(mesh.axes)
        asked = dict(zip(probe.axes, mesh.shape, strict=False)) | dict(zip(mesh.axes, mesh.shape, strict=True))
        example = ",".join(f"{axis}={asked.get(axis, 2)}" for axis in probe.axes)
        raise MeshError(f"probe {probe.name} has axes {wanted}, but the mesh has {given}", f"--mesh {example}")
    if num_ranks is not None and mesh.size != num_ranks:
        sizes = " * ".join(f"{axis}({size})" for axis, size in zip(mesh.axes, mesh.shape, strict=True))
        raise MeshError(f"{sizes} = {mesh.size} != WORLD_SIZE({num_ranks})", f"start {mesh.size} ranks, or give --mesh")
    return mesh


def _job(args: argparse.Namespace, probe: Probe, mesh: Mesh, folder: Path, notes: Path | None = None) -> ProbeJob:
    command = ("shardviz", *sys.argv[1:])
    followed = Followed.parse(args.trace)
    return ProbeJob(probe, mesh, folder.resolve(), command, args.values, followed, notes=notes, question=QUESTION)


def _show_prints(rank: int, text: str) -> None:
    """Print rank 0's output without torch's log; every rank would print the same."""
    if rank == 0:
        sys.stderr.writelines(line for line in text.splitlines(keepends=True) if not LOG_LINE.match(line))


def _run_joined(args: argparse.Namespace, probe: Probe, mesh: Mesh, folder: Path) -> int:
    """Be one rank of a torchrun job; each machine's lowest rank reports once all have written."""
    from shardviz.commands.common.dumps import says_it_is_a_part
    from shardviz.live import world

    job = replace(_job(args, probe, mesh, folder), force=_may_replace(args, probe, mesh, folder))
    timeout = args.timeout or JOINED_TIMEOUT
    if not world.run_joined(TASK, (job,), backend=args.backend, timeout=timeout, coords=job.mesh.labels):
        return EXIT_CLEAN
    return EXIT_USAGE if says_it_is_a_part(folder) else _report(args, probe, mesh, folder)


def _report(args: argparse.Namespace, probe: Probe, mesh: Mesh, folder: Path, *, is_news: bool = True) -> int:
    """Check the dump and print the verdict; say where the dump is, if that is news."""
    from shardviz.commands import check

    code = check.report([folder], args.format, args.color, strict=args.strict)
    if is_news:
        print(f"wrote {folder}; look at it with: shardviz view {shlex.quote(str(folder))}", file=sys.stderr)
    if args.save_test:
        from shardviz.commands.common.dumps import read_dump

        save_test(args.save_test, read_dump(folder), probe, mesh)
        print(f"wrote {args.save_test}; run it with: pytest {args.save_test}", file=sys.stderr)
    return code


EXACT = {"float32": 1 << 24, "float16": 1 << 11, "bfloat16": 1 << 8}
"""Ids below this are exact in a dtype; other dtypes hold all ids, or none."""
TEMPLATE = '''"""Where {name} puts every weight.

As `shardviz probe` saw it on mesh {mesh} with torch {torch}.
"""

{imports}
LAYOUTS = {{
{layouts}
}}


@spmd(mesh={{{axes}}})
{test}'''
STAMPED = """def test_every_weight_is_where_it_was(mesh):
    model = probe.{build}(){double}
    stamps = stamp(model)
    model = probe.parallelize(model, mesh) or model
    assert_layout(model, LAYOUTS)
    assert_ordered(model, stamps=stamps{stages})
"""
CAPTURED = """def test_every_weight_is_where_it_was(mesh, shard_dump):
    capture_sharding(probe.{build}, probe.parallelize, shard_dump, mesh=mesh{stages})
    assert_layout(shard_dump, LAYOUTS)
    assert_ordered(shard_dump)
"""
"""For sharding that casts to a dtype which cannot hold every id: ids are written one digit per pass."""


def check_file(file: Path, *, force: bool) -> None:
    """Check that a test may be written to `file`.

    Raises:
        ShardvizError: The file exists and `force` was not given, or it is not a Python file.
    """
    if file.suffix != ".py":
        raise ShardvizError(f"{file} is not a Python file", "use a name that pytest collects, such as test_sharding.py")
    if file.exists() and not force:
        raise ShardvizError(f"{file} exists", "use --force to replace it, or choose another name")


def save_test(file: Path, dump: Dump, probe: Probe, mesh: Mesh) -> None:
    """Write a test that asserts a dump's layouts, and that ranks hold what they claim.

    Raises:
        ShardvizError: The file cannot be written.
    """
    write_file(text_of_test(file, dump, probe, mesh), file, "--save-test")


def text_of_test(file: Path, dump: Dump, probe: Probe, mesh: Mesh) -> str:
    """Return the text of the test that `save_test` writes."""
    stages = "STAGE_AXES" in probe.path.read_text(encoding="utf-8")
    is_cast = not _are_exact(dump, "stamped")
    return TEMPLATE.format(
        name=probe.name,
        mesh=mesh,
        torch=dump.files.run.torch,
        imports=_imports(file, probe, is_cast=is_cast),
        layouts="\n".join(f'    "{name}": {text},' for name, text in _layouts(dump)),
        axes=", ".join(f'"{axis}": {size}' for axis, size in zip(mesh.axes, mesh.shape, strict=True)),
        test=(CAPTURED if is_cast else STAMPED).format(
            build=probe.build,
            double="" if _are_exact(dump, "initial") else ".double()",
            stages=", stage_axes=probe.STAGE_AXES" if stages else "",
        ),
    )


def _are_exact(dump: Dump, moment: Moment) -> bool:
    """Whether the dtypes of a moment can hold every id."""
    last = max((stamp.last for stamp in dump.files.run.stamps), default=0)
    dtypes = {shard.body.dtype for tensor in dump.at(moment) for shard in tensor.shards.values()}
    return all(last < EXACT.get(dtype, last + 1) for dtype in dtypes)


def _imports(file: Path, probe: Probe, *, is_cast: bool) -> str:
    names = ["assert_layout", "assert_ordered", "spmd", *([] if is_cast else ["stamp"])]
    capture = "from shardviz import capture_sharding\n" if is_cast else ""
    if is_shipped(probe) or probe.module:
        package, _, name = (probe.module or f"shardviz.probes.{probe.name.replace('/', '.')}").rpartition(".")
        loaded = f"from {package} import {name} as probe\n" if package else f"import {name} as probe\n"
        return f"{capture}{loaded}from shardviz.testing import {', '.join(names)}\n"
    path = os.path.relpath(probe.path, file.resolve().parent)
    import_lines = f"{capture}from shardviz.testing import {', '.join(sorted([*names, 'load_probe']))}\n"
    load = f'probe = load_probe(Path(__file__).parent / "{path}", "{probe.build}")\n'
    return f"from pathlib import Path\n\n{import_lines}\n{load}"


def _layouts(dump: Dump) -> Iterator[tuple[str, str]]:
    """Yield a rule for each parameter; identical layers share one if its pattern is exact."""
    tensors = [tensor for tensor in dump.at("stamped") if tensor.role == "param"]
    texts = {name: _layout(tensor) for tensor in tensors for name in tensor.names}
    done: set[str] = set()
    for tensor in tensors:
        pattern = f"{tensor.fold.prefix}*{tensor.fold.suffix}"
        matched = {name for name in texts if fnmatchcase(name, pattern)}
        if len(tensor.names) > 1 and len({texts[name] for name in matched}) == 1 and not matched <= done:
            yield pattern, texts[tensor.names[0]]
            done |= matched
        for name in tensor.names:
            if name not in done:
                yield name, texts[name]
                done.add(name)


def _layout(tensor: Tensor) -> str:
    if len(tensor.claims) > 1:
        return "None"
    return f'"{write(tensor.claimed)}"' if tensor.claimed else f'"{list(tensor.first.body.local_shape)}"'
