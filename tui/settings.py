"""What the viewer remembers from one session to the next: the theme."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

MOST_BYTES = 1 << 16
"""A file of settings that is longer was not written by the viewer."""


def _file() -> Path:
    """Return the file of settings, where programs of this system keep theirs."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".config") / "shardviz" / "viewer.json"


def _settings() -> dict[str, object]:
    """Return what is remembered; nothing where there is no such file, or where it is damaged."""
    try:
        with _file().open("rb") as file:
            settings = json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError, RuntimeError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def remembered_theme() -> str:
    """Return the theme that the user chose last; empty where none was."""
    theme = _settings().get("theme", "")
    return theme if isinstance(theme, str) else ""


def remember_theme(theme: str) -> None:
    """Keep a theme for the next session; where nothing can be written, it is forgotten."""
    settings = _settings()
    if settings.get("theme") == theme:
        return
    with suppress(OSError, RuntimeError):
        path = _file()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps({**settings, "theme": theme}), encoding="utf-8")
        temporary.replace(path)
