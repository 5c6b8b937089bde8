"""Print a script that completes commands and options in a shell.

examples:
  eval "$(shardviz completion bash)"                                   in ~/.bashrc
  eval "$(shardviz completion zsh)"                                    in ~/.zshrc, after compinit
  shardviz completion fish > ~/.config/fish/completions/shardviz.fish
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shardviz.errors import EXIT_CLEAN

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

BASH = """\
_shardviz() {
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words=
    if (( COMP_CWORD == 1 )); then
        words="@VERBS@ help --help --version"
    else
        case "${COMP_WORDS[1]} $before" in
            "help help") words="@VERBS@" ;;
@CHOICES@
            *)
                case "${COMP_WORDS[1]} ${current:0:1}" in
@OPTIONS@
                esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _shardviz shardviz
"""

ZSH = "autoload -Uz bashcompinit && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    script = {"bash": _bash, "zsh": lambda: ZSH + _bash(), "fish": _fish}[args.shell]()
    sys.stdout.write(script)
    return EXIT_CLEAN


def _bash() -> str:
    from shardviz.cli import VERBS

    choices, options = [], []
    for verb in VERBS:
        actions = list(_actions(verb))
        words = [name for names, _, _ in actions for name in names if name.startswith("--")]
        places = [choice for names, values, _ in actions if not names for choice in values or ()]
        options.append(f'                    "{verb} -") words="{" ".join(words)}" ;;')
        options += [f'                    "{verb} "*) words="{" ".join(places)}" ;;'] if places else []
        for names, values, _ in actions:
            if names and values is not None:
                patterns = "|".join(f'"{verb} {name}"' for name in names)
                choices.append(f'            {patterns}) words="{" ".join(values)}" ;;')
    script = BASH.replace("@CHOICES@", "\n".join(choices)).replace("@OPTIONS@", "\n".join(options))
    return script.replace("@VERBS@", " ".join(VERBS))


def _fish() -> str:
    from shardviz.cli import VERBS, summary_of

    lines = [
        f"complete -c shardviz -n __fish_use_subcommand -f -a {verb} -d {_quote(summary_of(verb))}" for verb in VERBS
    ]
    for verb in VERBS:
        start = f"complete -c shardviz -n '__fish_seen_subcommand_from {verb}'"
        for names, values, text in _actions(verb):
            flags = "".join(f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}" for name in names)
            given = " -r" if names and values is not None else ""
            given += f" -f -a {_quote(' '.join(values))}" if values else ""
            lines += [f"{start}{flags}{given} -d {_quote(text)}"] if flags or given else []
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _actions(verb: str) -> Iterator[tuple[list[str], list[str] | None, str]]:
    """Yield a verb's arguments: their options, the values that they may have, and what they are.

    If an argument may have any value, that is an empty list; if it has none, None.
    """
    from shardviz.cli import parser_for

    for action in parser_for(verb)._actions:
        values = [str(choice) for choice in action.choices or ()] if action.nargs != 0 else None
        if verb == "probe" and action.dest == "probe":
            values = _probes()
        yield list(action.option_strings), values, (action.help or "").split(";")[0]


def _probes() -> list[str]:
    from shardviz.probe_files import installed, shipped_files

    return [*shipped_files(), *(probe.name for probe in installed()[0])]
