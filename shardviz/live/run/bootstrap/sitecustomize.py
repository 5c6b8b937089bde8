"""Python imports this at the start of every process of a job that `shardviz run` started.

It imports nothing of torch and must never stop a process; a `sitecustomize` of the user's own runs as ever.
"""

import os
import sys


def _watch_imports() -> None:
    try:
        from shardviz.live.run.hooks.table import install

        install()
    except Exception as error:
        if os.environ.get("RANK", "0") == "0":
            what = f"{sys.executable} cannot import shardviz's hooks ({type(error).__name__}: {error})"
            print(f"shardviz: this process is not watched: {what}", file=sys.stderr)
            _note("not-watched", what)


def _note(kind: str, text: str) -> None:
    """Leave a note for `shardviz run`, as `options.leave` does where shardviz can be imported."""
    import json

    try:
        session = json.loads(os.environ["SHARDVIZ_RUN"])["session"]
        with open(os.path.join(session, f"notes-{os.getpid()}.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "rank": -1, "text": text}) + "\n")
    except (OSError, ValueError, KeyError):
        pass


def _run_hidden_sitecustomize() -> None:
    """Import the `sitecustomize` that this one hides."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    own_folder = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry or ".") != own_folder]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if os.environ.get("SHARDVIZ_RUN"):
        _watch_imports()
    _run_hidden_sitecustomize()
