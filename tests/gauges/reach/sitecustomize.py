"""Writes down each function of shardviz that a process enters: every Python with this folder on its path imports it.

A line is a file and the line on which the function begins, written at once, since ranks are killed. It imports little.
"""

import os
import sys
import threading

ROOT = os.environ.get("SHARDVIZ_REACH_ROOT", "")
FOLDER = os.environ.get("SHARDVIZ_REACH_FOLDER", "")
ROOMS = (os.path.join(ROOT, "shardviz") + os.sep, os.path.join(ROOT, "tui") + os.sep)


def _watch() -> None:
    entered = set()

    def note(code):
        if code not in entered:
            entered.add(code)
            if code.co_filename.startswith(ROOMS):
                with open(os.path.join(FOLDER, str(os.getpid())), "a", encoding="utf-8") as file:
                    file.write(f"{os.path.relpath(code.co_filename, ROOT)}:{code.co_firstlineno}\n")

    if sys.version_info >= (3, 12):
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.PROFILER_ID, "shardviz reach")

        def started(code, offset):
            note(code)
            return monitoring.DISABLE

        monitoring.register_callback(monitoring.PROFILER_ID, monitoring.events.PY_START, started)
        monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.PY_START)
    else:

        def called(frame, event, argument):
            if event == "call":
                note(frame.f_code)

        threading.setprofile(called)
        sys.setprofile(called)


if ROOT and FOLDER:
    _watch()
