"""A verb's arguments: argparse with shardviz's errors, which suggest the likely spelling."""

from __future__ import annotations

import argparse
import math
import re
from typing import TYPE_CHECKING, NoReturn

from shardviz.errors import ShardvizError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_SECONDS = 1_000_000
"""Eleven days: more is a slip, and far more is refused by the system's own clocks."""

_CHOICE = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<known>.*)\)")
_REST = re.compile(r"unrecognized arguments: (?P<first>.*?)( .*)?")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are shardviz's own."""

    def read(self, args: Sequence[str]) -> argparse.Namespace:
        """Read arguments; unknown options are refused first, which argparse does too late.

        Raises:
            ShardvizError: They are not what the verb takes.
        """
        from shardviz.text import did_you_mean  # not for `shardviz --help`

        for arg in args:
            name = arg.partition("=")[0]
            if arg == "--":
                break
            if name.startswith("--") and name not in self._option_string_actions:
                hint = did_you_mean(name, self._option_string_actions) or self._where_it_belongs()
                raise ShardvizError(f"{self.prog} has no option {name}", hint)
        takes_job = any(action.dest == "job" for action in self._actions)
        return self.parse_args(args) if takes_job else self.parse_intermixed_args(args)

    def add_format(self, *choices: str) -> None:
        """Add `--format`: the first choice is the default, as text is for people."""
        self.add_argument("--format", choices=choices, default=choices[0], help=f"default: {choices[0]}")

    def add_output(self, metavar: str, text: str, *, required: bool = False) -> None:
        """Add `-o`: a folder or a file that is written."""
        from pathlib import Path  # not for `shardviz --help`

        self.add_argument("-o", "--output", type=Path, required=required, metavar=metavar, help=text)

    def add_force(self, text: str) -> None:
        """Add `--force`: what it replaces."""
        self.add_argument("--force", action="store_true", help=text)

    def add_strict(self, done: str = "checked") -> None:
        """Add `--strict`: silence never means that something was not looked at."""
        self.add_argument("--strict", action="store_true", help=f"also exit with 1 if anything was not {done}")

    def _where_it_belongs(self) -> str:
        if any(action.dest == "job" for action in self._actions):
            return f"put -- before the command whose option it is: {self.prog} -- CMD ...; or see {self.prog} --help"
        return f"{self.prog} --help"

    def error(self, message: str) -> NoReturn:
        """Raise what argparse complains of."""
        from shardviz.text import did_you_mean

        hint = f"{self.prog} --help"
        if choice := _CHOICE.search(message):
            hint = did_you_mean(choice["given"], re.findall(r"[\w.-]+", choice["known"])) or hint
        elif rest := _REST.fullmatch(message):
            message = f"{self.prog} takes no further argument {rest['first']!r}"
        raise ShardvizError(message, hint)


def seconds(text: str) -> float:
    """Read a time to wait, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid timeout: expected seconds, greater than 0 and at most {MAX_SECONDS:,}"
        )
    return number


def count(text: str, *, of: str = "values", least: int = 0, most: int = 10**18 - 1) -> int:
    """Read how many of something, for argparse; for something else, by `partial`."""
    if not re.fullmatch("[0-9]+", text) or not least <= int(text[:20]) <= most:
        limit = f"{least} or more" if most >= 10**18 - 1 else f"{least} to {most:,}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {of}: expected {limit}")
    return int(text)
