"""Where a rank hangs: its Python stack, asked for by signal, its collective and its group.

The signal's handler is C code (`faulthandler`), so it answers while the main thread waits inside gloo or nccl. The
group is read from the local variables of its frames, by the thread that listens to the launcher: collectives let other
threads run while they wait. A rank in a collective that does not cannot answer, and is reported without the axis.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from types import FrameType

PATIENCE = 1.5
"""Seconds that a rank has to write its stacks."""
_RUNNERS = (str(Path(__file__).parent / "rank.py"), str(Path(__file__).parents[2] / "testing" / "plugin" / "ranks.py"))
"""Files with a function `call` that calls the user's code."""
_COLLECTIVES = ("distributed_c10d.py", "_functional_collectives.py")
_LIBRARY = str(Path(os.__file__).parent) + os.sep
_open_files: list[object] = []


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        return f'  File "{self.file}", line {self.line}, in {self.function}' + (f"\n    {source}" if source else "")


Stack = tuple[Frame, ...]
"""From the task inwards."""


def register(folder: Path, rank: int) -> None:
    """Make this process write the stacks of all its threads to a file when SIGUSR1 comes."""
    file = _path(folder, rank).open("w")
    _open_files.append(file)  # faulthandler keeps the number only
    faulthandler.enable(all_threads=False)  # a crash leaves its stack in the rank's output
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)


def ask(folder: Path, pids: dict[int, int]) -> dict[int, dict[int, Stack]]:
    """Ask processes for their stacks.

    Args:
        pids: The process to ask, by the rank that it registered with.

    Returns:
        By rank, and by thread ident; a process that did not answer has no stacks.
    """
    for pid in pids.values():
        with suppress(OSError):
            os.kill(pid, signal.SIGUSR1)
    _wait_for_files([_path(folder, rank) for rank in pids])
    return {rank: _parse(_path(folder, rank).read_text(errors="replace")) for rank in pids}


def user_frames(stack: Stack) -> Stack:
    """Return the frames outside torch and the standard library, or all of them if none is."""
    return tuple(frame for frame in stack if not _is_plumbing(frame.file)) or stack


def waiting_in(stack: Stack) -> str:
    """Say where a stack is in a few words, by the collective if it is in one.

    That is the one that the user's code called, not those that it is made of.
    """
    last = user_frames(stack)[-1]
    beyond = stack[stack.index(last) + 1 :]
    inside = [frame for frame in beyond if "/torch/distributed/" in frame.file and _is_public(frame.function)]
    collectives = [frame.function for frame in inside if frame.file.endswith(_COLLECTIVES)]
    if collectives and collectives[0] not in ("wait_tensor", "wait"):
        return f"waiting in {collectives[0]}"
    if inside:
        return f"waiting in {inside[0].function}"
    return f"in {last.function} ({Path(last.file).name}:{last.line})"


def _is_plumbing(file: str) -> bool:
    if "/site-packages/" in file:
        return "/torch/" in file or file.endswith("/typing_extensions.py")
    return file.startswith((_LIBRARY, "<frozen")) or "/torch/distributed/" in file


def _is_public(function: str) -> bool:
    return not function.startswith(("_", "<")) and function not in ("wrapper", "inner", "forward", "backward")


def _path(folder: Path, rank: int) -> Path:
    return folder / f"stacks_{rank:05d}.txt"


def _wait_for_files(files: Iterable[Path]) -> None:
    deadline = time.monotonic() + PATIENCE
    sizes: list[int] = []
    while time.monotonic() < deadline:
        before, sizes = sizes, [file.stat().st_size for file in files]
        if sizes == before and all(sizes):
            return
        time.sleep(0.05)


def _parse(text: str) -> dict[int, Stack]:
    threads = re.split(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*$", text, flags=re.MULTILINE)[1:]
    return {int(ident, 16): _read(body) for ident, body in zip(threads[::2], threads[1::2], strict=True)}


def _read(body: str) -> Stack:
    matches = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', body, flags=re.MULTILINE)
    frames = [Frame(file, int(line), function) for file, line, function in reversed(matches)]
    own_frames = [index for index, frame in enumerate(frames) if frame.file in _RUNNERS and frame.function == "call"]
    return tuple(frames[own_frames[-1] + 1 :] if own_frames else frames)


GROUP_PATIENCE = 1.0
"""Seconds that ranks have to write down their groups."""
_MESHES = ("mesh", "device_mesh")
_MESH_DIMS = ("mesh_dim", "i")
"""The names that torch's redistribution has for its mesh and the axis that it has reached."""


def write_group(folder: Path, rank: int) -> None:
    """Write down the ranks of the group that this process's main thread waits in."""
    ranks = _group_ranks(sys._current_frames().get(threading.main_thread().ident or 0))
    file = _group_file(folder, rank)
    file.with_suffix(".tmp").write_text(json.dumps(ranks))
    file.with_suffix(".tmp").rename(file)


def read_groups(folder: Path, ranks: Collection[int]) -> dict[int, list[int]]:
    """Return the group that each of `ranks` wrote down; an empty list if it waits in none."""
    deadline = time.monotonic() + GROUP_PATIENCE
    files = {rank: _group_file(folder, rank) for rank in ranks}
    while time.monotonic() < deadline and not all(file.exists() for file in files.values()):
        time.sleep(0.02)
    return {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}


def axes_text(group: Collection[int], coords: Sequence[str]) -> str:
    """Name the axes along which a group's ranks differ: "over tp"; empty if unknown.

    Args:
        coords: A label for every rank, "fsdp=1, tp=0"; without labels nothing can be named.
    """
    if not group or not all(rank < len(coords) for rank in group):
        return ""
    parts = [coords[rank].split(", ") for rank in group]
    axes = [of_axis[0].partition("=")[0] for of_axis in zip(*parts, strict=True) if len(set(of_axis)) > 1]
    if len(axes) > 1 and len(group) == len(coords):
        return "over all ranks"
    return f"over {' and '.join(axes)}" if axes else ""


def _group_file(folder: Path, rank: int) -> Path:
    return folder / f"groups_{rank:05d}.json"


def _group_ranks(frame: FrameType | None) -> list[int]:
    """Return the ranks of the innermost group that a stack has to do with; empty if it has none."""
    torch = sys.modules.get("torch.distributed")  # never imported here: a rank may be at it in its own thread
    if torch is None or not hasattr(torch, "get_process_group_ranks"):
        return []
    for group in _groups(frame, torch.ProcessGroup):
        with suppress(Exception):  # it may be destroyed
            return [int(rank) for rank in torch.get_process_group_ranks(group)]
    return []


def _groups(frame: FrameType | None, kind: type) -> Iterator[Any]:
    while frame is not None:
        if "/torch/distributed/" in frame.f_code.co_filename:
            variables = frame.f_locals
            yield from (value for value in variables.values() if isinstance(value, kind))
            mesh = next((variables[name] for name in _MESHES if hasattr(variables.get(name), "get_group")), None)
            dim = next((variables[name] for name in _MESH_DIMS if isinstance(variables.get(name), int)), None)
            if mesh is not None and (dim is not None or mesh.ndim == 1):
                with suppress(Exception):
                    yield mesh.get_group(dim or 0)
        frame = frame.f_back
