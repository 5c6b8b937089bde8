"""Build the sdist and the wheel, install the wheel in a fresh environment, and use it from an empty folder.

Run by `make wheel`, not by pytest: it installs torch anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
BESIDE = {
    *("CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "SECURITY.md", "pyproject.toml"),
    ".gitignore",  # hatchling reads it while it builds
}
"""What the sdist has besides the package."""


def main() -> None:
    """Fail loudly on the first thing that a user of the wheel would not get."""
    with tempfile.TemporaryDirectory(prefix="shardviz-wheel-") as folder:
        wheel = build(Path(folder))
        python = install(wheel, Path(folder) / "venv")
        use(python, Path(folder))
    print("wheel: builds, installs in a fresh environment, and runs there")


def build(folder: Path) -> Path:
    """Build both, and check what is in them."""
    run(sys.executable, "-m", "build", "--quiet", "--outdir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    outside = [name for name in names if not name.startswith(("shardviz/", "shardviz-"))]
    assert not outside, f"the wheel puts files outside its package: {outside}"
    for needed in ("shardviz/py.typed", "shardviz/probes/tp_fsdp.py", "shardviz/tui/app.py"):
        assert needed in names, f"the wheel lacks {needed}"
    packaged = {name for name in names if name.startswith("shardviz/")}
    assert packaged == sources(), f"wheel and checkout differ: {sorted(packaged ^ sources())}"
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    wanted = packaged | BESIDE
    assert inside == wanted, f"the sdist differs from what it should have: {sorted(inside ^ wanted)}"
    return wheel


def sources() -> set[str]:
    """Return the wheel's names of every file of the package that git tracks, or would."""
    rooms = {"shardviz": "shardviz", "probes": "shardviz/probes", "tui": "shardviz/tui"}
    return {
        f"{inside}/{path.relative_to(ROOT / room).as_posix()}"
        for room, inside in rooms.items()
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def install(wheel: Path, venv: Path) -> Path:
    """Install the wheel in an environment of its own, beside the torch that runs this.

    What is used of torch is compiled when it is used: all of it takes two thirds of the time that installing takes.
    """
    run(sys.executable, "-m", "venv", str(venv))
    python = venv / "bin" / "python"
    torch = f"torch=={version('torch').partition('+')[0]}"
    run(str(python), "-m", "pip", "install", "--quiet", "--no-compile", torch, str(wheel))
    return python


def use(python: Path, folder: Path) -> None:
    """Do what the README does."""
    shardviz = str(python.with_name("shardviz"))
    work = folder / "work"
    work.mkdir()
    run(shardviz, "probe", "tp_fsdp", "--mesh", "2,4", cwd=work)
    run(shardviz, "show", "tp_fsdp-2x4.shardviz", "up.weight", cwd=work)
    run(shardviz, "view", "tp_fsdp-2x4.shardviz", cwd=work)
    run(shardviz, "check", "tp_fsdp-2x4.shardviz", cwd=work)


def run(*command: str, cwd: Path | None = None) -> None:
    """Run a command; its failure is ours."""
    print("+", *command, flush=True)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, check=True, cwd=cwd, env=environ)


if __name__ == "__main__":
    main()
