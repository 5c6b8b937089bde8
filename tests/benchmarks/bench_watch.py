"""`shardviz probe tp_fsdp --mesh 2,4 --watch`: from a save to the verdict, against a plain probe."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from whole import Timing, compare, verdict

from shardviz import probe_files

SAVES = 9
PROBE = [sys.executable, "-m", "shardviz", "probe", "mine.py", "--mesh", "2,4"]
SECONDS = 1.5
"""What a save may take on a machine that does nothing else."""


def main() -> None:
    """Print the ratio, and the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(probe_files.find("tp_fsdp").path, Path(folder, "mine.py"))
        (plain,) = compare([*PROBE, "--force"], runs=3, cwd=Path(folder))
        saved = _saves(Path(folder))
    print(f"plain probe:       {plain}\nsave to verdict:   {saved}")
    verdict("save to verdict / plain probe", saved.median / plain.median, 0.5)
    verdict("seconds from save to verdict, on a quiet machine", min(saved.seconds), SECONDS)


def _saves(folder: Path) -> Timing:
    """Save the probe again and again, each time once the verdict on the last one is there."""
    printed = folder / "printed.txt"
    with printed.open("w") as file:
        process = subprocess.Popen([*PROBE, "--watch"], cwd=folder, stdout=file, stderr=subprocess.STDOUT)
    taken = []
    try:
        for turn in range(SAVES + 1):
            start = time.perf_counter()
            while printed.read_text().count("\nwatching ") <= turn:
                time.sleep(0.005)
                assert process.poll() is None, printed.read_text()
            taken.append(time.perf_counter() - start)
            (folder / "mine.py").write_text((folder / "mine.py").read_text() + "\n")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    return Timing(tuple(taken[1:]))


if __name__ == "__main__":
    main()
