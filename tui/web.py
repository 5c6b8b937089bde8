"""The TUI in a browser, through textual-serve if it is installed; by default it listens on this machine only."""

from __future__ import annotations

import shlex
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from shardviz.dump.read import read_run
from shardviz.errors import ShardvizError

if TYPE_CHECKING:
    from pathlib import Path


def serve(
    path: Path,
    other: Path | None = None,
    *,
    tensor: str | None = None,
    rank: int | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
) -> None:
    """Serve the TUI of a dump until interrupted; every visitor gets their own, opened on the tensor and the rank given.

    Raises:
        DumpError: A folder is not a dump.
        ShardvizError: textual-serve is not installed, or the port cannot be used.
    """
    folders = [folder.resolve() for folder in (path, other) if folder is not None]
    for folder in folders:
        read_run(folder)
    try:
        server = import_module("textual_serve.server")
    except ModuleNotFoundError:
        raise ShardvizError(
            "view --web needs textual-serve, which is not installed", "pip install 'shardviz[web]'"
        ) from None
    if not 1 <= port <= 65535:
        raise ShardvizError(f"port {port} is not between 1 and 65,535")
    opened_on = [*([tensor] if tensor else []), *(["--rank", str(rank)] if rank is not None else [])]
    command = shlex.join([sys.executable, "-m", "shardviz", "view", *map(str, folders), *opened_on])
    try:
        server.Server(command, host=host, port=port, title="shardviz").serve()
    except OSError as error:
        raise ShardvizError(
            f"cannot listen on {host}:{port}: {error.strerror}", "choose another port with --port"
        ) from error
