"""The command line: finds the verb, and imports the module that does it only then.

Data goes to stdout and talk to stderr; a mistake that a user can mend is one line and a hint, never a traceback.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardviz.commands.common.parser import Parser
from shardviz.commands.common.streams import forget, say, say_error, talk
from shardviz.errors import EXIT_BUG, EXIT_CLEAN, EXIT_INTERRUPTED, EXIT_USAGE, ShardvizError

if TYPE_CHECKING:
    from collections.abc import Sequence

VERBS = (
    "probe",
    "probes",
    "run",
    "plan",
    "gather",
    "check",
    "show",
    "view",
    "diff",
    "explain",
    "mesh",
    "schema",
    "stamp-checkpoint",
    "audit",
    "completion",
)

DEBUG = "SHARDVIZ_DEBUG"
"""The environment variable that asks for the traceback of a bug."""

MAX_BUG_TEXT = 300
"""Characters of a bug's own message that are shown."""

EXAMPLES = """\
examples:
  shardviz probe tp_fsdp --mesh 2,4
  shardviz show tp_fsdp-2x4.shardviz up.weight
  shardviz explain "[12/tp/fsdp, 12]" --mesh fsdp=2,tp=4
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments; those of the process by default.

    Returns:
        The exit code, as `shardviz.errors` has them. Whoever reads stdout may close it early, as `| head` does: the
        code is that of what was found, not of the pipe.
    """
    _open_streams()
    code = EXIT_CLEAN
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
    except ShardvizError as error:
        if _is_first_to_report(error):
            say_error(error)
        return error.exit_code
    except KeyboardInterrupt as error:
        say("interrupted", *str(error).splitlines())
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        forget(sys.stdout)
        return code
    except MemoryError:
        say("error: not enough memory", "Hint: use a machine with more memory, or write a dump with fewer values")
        return EXIT_USAGE
    except OSError as error:
        named = f": {error.filename}" if error.filename else ""
        say(f"error: {error.strerror or error}{named}")
        forget(sys.stdout)
        return EXIT_USAGE
    except Exception as error:
        return _report_bug(error)
    return code


def _report_bug(error: Exception) -> int:
    """Print one line that says shardviz itself has a bug, and where; return its exit code."""
    import traceback

    if os.environ.get(DEBUG):
        talk("".join(traceback.format_exception(error)).rstrip())
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).strip().partition("\n")[0][:MAX_BUG_TEXT]
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    say(
        f"error: a bug in shardviz: {what} ({os.path.basename(last.filename)}:{last.lineno}, in {last.name})",
        f"Hint: report it in shardviz's issue tracker, with the command and what {DEBUG}=1 prints",
    )
    return EXIT_BUG


def _is_first_to_report(error: ShardvizError) -> bool:
    """Whether this error hasn't been printed by a different rank of this job."""
    if "RANK" not in os.environ:
        return True
    from shardviz.live import world

    return world.is_first_to_report(str(error))


def _open_streams() -> None:
    """Replace closed stdout or stderr (`>&-`) by /dev/null; escape unencodable characters."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _run(argv: Sequence[str]) -> int:
    if not argv:
        print(_top_parser().format_help(), end="", file=sys.stderr)
        return EXIT_USAGE
    verb, *rest = argv
    if verb in ("-h", "--help", "help"):
        if rest and rest[0] not in VERBS:
            raise ShardvizError(*_unknown(rest[0]))
        print((parser_for(rest[0]) if rest else _top_parser()).format_help(), end="")
        return EXIT_CLEAN
    if verb in ("-V", "--version"):
        print(_versions())
        return EXIT_CLEAN
    if verb not in VERBS:
        raise ShardvizError(*_unknown(verb))
    module = _module_of(verb)
    code: int = module.run(parser_for(verb).read(rest))
    return code


def _file_of(verb: str) -> str:
    return verb.replace("-", "_")


def _module_of(verb: str) -> Any:
    return import_module(f"shardviz.commands.{_file_of(verb)}")


def parser_for(verb: str) -> Parser:
    """Return the parser of one verb; the docstring of its module is the help."""
    module = _module_of(verb)
    description, _, examples = str(module.__doc__).partition("\nexamples:\n")
    parser = Parser(prog=f"shardviz {verb}", description=description, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"examples:\n{examples}"
    module.add_arguments(parser)
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="default: auto")
    return parser


def summary_of(verb: str) -> str:
    """Return the first line of a verb's help, read from its file: imports would take a second."""
    with open(os.path.join(os.path.dirname(__file__), "commands", f"{_file_of(verb)}.py"), encoding="utf-8") as file:
        return file.readline().strip('".\n')


def _top_parser() -> argparse.ArgumentParser:
    width = max(len(verb) for verb in VERBS if "-" not in verb)  # a longer one stands out, and lines stay below 80
    verbs = "".join(f"  {verb:<{width}}  {summary_of(verb)}\n" for verb in VERBS)
    parser = Parser(
        prog="shardviz",
        usage="shardviz COMMAND ...",
        description="See where every element of a sharded PyTorch model really is.",
        epilog=f"commands:\n{verbs}\nshardviz COMMAND --help says more.\n\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="store_true", help="print the versions of shardviz and torch")
    return parser


def _unknown(word: str) -> tuple[str, str]:
    """Return the message and the hint for a word that is not a command."""
    from shardviz.text import did_you_mean

    if word.startswith("-"):
        hint = did_you_mean(word, ("--help", "--version")) or "options follow the command"
        return f"shardviz has no option {word}", hint
    return f"unknown command {word!r}", did_you_mean(word, VERBS) or f"commands: {', '.join(VERBS)}"


def _versions() -> str:
    from platform import python_version

    from shardviz.versions import package_version

    packages = (f"{package} {package_version(package) or 'not installed'}" for package in ("shardviz", "torch"))
    return ", ".join([*packages, f"Python {python_version()}"])
