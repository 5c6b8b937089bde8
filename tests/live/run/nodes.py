"""Two nodes of a job on this machine, each with a folder, a HOME and a TMPDIR that the other does not see."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.live.run.jobs import ABORTED, TORCHRUN, Ran, environment
from tests.live.run.ranks import free_port

if TYPE_CHECKING:
    from pathlib import Path

NODES = (0, 1)
RUN = (sys.executable, "-m", "shardviz", "run", "-o", "job.shardviz")
HIDING = ("unshare", "--map-root-user", "--mount")
"""A command of its own mounts: in them, the other node's folder is empty."""


def run_on_two(
    folder: Path, script: str, *words: str, before: tuple[str, ...] = (*RUN, "--", *TORCHRUN), ranks: int = 2
) -> list[Ran]:
    """Run a script on some ranks of each of two nodes; again if gloo aborted a rank at its exit.

    Args:
        folder: Where the nodes get a folder each.
        script: The script.
        words: Its arguments.
        before: What starts a node's ranks, with the options of torchrun that follow.
        ranks: How many ranks a node has.
    """
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        ran = _run(folder, script, words, before, ranks)
        if not any(ABORTED in one.err for one in ran):
            break
    return ran


def _run(folder: Path, script: str, words: tuple[str, ...], before: tuple[str, ...], ranks: int) -> list[Ran]:
    meeting = ("--master-addr", "127.0.0.1", "--master-port", free_port())
    processes = []
    for node in NODES:
        place = folder / f"node_{node}"
        for name in ("home", "tmp"):
            (place / name).mkdir(parents=True)
        (place / "job.py").write_text(script)
    for node in NODES:
        place = folder / f"node_{node}"
        nodes = ("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(ranks))
        command = (*_alone(folder / f"node_{1 - node}", place), *before, *nodes, *meeting, "job.py", *words)
        environ = environment() | {"HOME": str(place / "home"), "TMPDIR": str(place / "tmp")}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, cwd=place, env=environ, **pipes))
    said = [process.communicate(timeout=240) for process in processes]
    return [
        Ran(process.returncode, *texts, folder / f"node_{node}")
        for node, process, texts in zip(NODES, processes, said, strict=True)
    ]


def _alone(hidden: Path, place: Path) -> tuple[str, ...]:
    """Return what a command is put behind, so that it does not see a folder; nothing where the system has no such."""
    if (
        shutil.which(HIDING[0]) is None
        or subprocess.run((*HIDING, "true"), check=False, capture_output=True).returncode
    ):
        return ()
    return (*HIDING, "sh", "-c", f'mount -t tmpfs none "{hidden}" && cd "{place}" && exec "$@"', "sh")
