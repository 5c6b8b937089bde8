"""A real IPython kernel in a process of its own: what a notebook shows of a cell."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jupyter_client.manager import KernelManager

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT = 60


@dataclass
class Answer:
    """What a kernel answers to a cell.

    Attributes:
        text: What an IPython at a prompt would print.
        shown: What each output is in each MIME type.
        error: The type and the words of an exception; empty if none was raised.
    """

    text: str = ""
    shown: list[dict[str, Any]] = field(default_factory=list)
    error: tuple[str, str] = ("", "")


class Kernel:
    """A kernel that runs in a folder, with no one's settings."""

    def __init__(self, folder: Path) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.folder = folder

    def __enter__(self) -> Kernel:
        own = {"IPYTHONDIR": str(self.folder / ".ipython"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        quiet = subprocess.DEVNULL  # it says that messages go over a socket of this machine
        self.manager.start_kernel(cwd=str(self.folder), env={**os.environ, **own}, stderr=quiet)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=TIMEOUT)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def run(self, code: str) -> Answer:
        """Run a cell, and wait for its end."""
        answer = Answer()

        def hear(message: dict[str, Any]) -> None:
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    answer.text += content["text"]
                case "display_data":
                    answer.shown.append(content["data"])
                    answer.text += content["data"]["text/plain"]
                case "execute_result":
                    answer.shown.append(content["data"])
                    plain = content["data"]["text/plain"]
                    begin = "\n" if "\n" in plain else " "
                    answer.text += f"Out[{content['execution_count']}]:{begin}{plain}\n"
                case "error":
                    answer.error = content["ename"], content["evalue"]
                    answer.text += f"{content['ename']}: {content['evalue']}\n"

        self.client.execute_interactive(code, output_hook=hear, timeout=TIMEOUT)
        return answer

    def completed(self, code: str) -> list[str]:
        """Return what TAB offers at the end of a line."""
        return self.client.complete(code, len(code), reply=True, timeout=TIMEOUT)["content"]["matches"]
