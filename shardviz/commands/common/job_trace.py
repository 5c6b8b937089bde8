"""The trace of a job's step, which its ranks wrote beside the dump, becomes a part of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardviz.commands.common.streams import talk
from shardviz.dump.traced import write_around
from shardviz.dump.write import TRACE_FOLDER, prepare_folder
from shardviz.errors import DumpError

if TYPE_CHECKING:
    from pathlib import Path


def keep_trace(session: Path, output: Path, *, is_captured: bool, force: bool) -> bool:
    """Move the trace of a job's step into its dump, and say so; make a dump where the job has none.

    Args:
        session: Where the ranks on this machine left it.
        output: The dump's folder.
        is_captured: Whether the job has written its dump.
        force: Replace what is there, if that is a dump.

    Returns:
        Whether there is a trace.
    """
    source = session / TRACE_FOLDER
    files = sorted(source.iterdir()) if source.is_dir() else []
    if not files:
        talk("shardviz: no step was traced: no optimizer of the job stepped a model that it had called")
        return False
    try:
        if not is_captured:
            write_around(source, prepare_folder(output, force=force))
        target = output / TRACE_FOLDER
        target.mkdir(exist_ok=True)
        for file in files:
            os.replace(file, target / file.name)
    except (OSError, DumpError) as error:
        talk(f"shardviz: the trace of the step could not be kept: {error}")
        return False
    shown = os.path.relpath(output)
    talk(f"traced a step into {shown}; lay it beside another job's with: shardviz diff ONE OTHER")
    return True
