"""List the recipes that `shardviz probe` knows, a line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.errors import EXIT_CLEAN

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the verb has no arguments of its own."""


def run(args: argparse.Namespace) -> int:
    """Print the recipes."""
    from shardviz import recipes
    from shardviz.commands._dumps import terminal_for, write_answer
    from shardviz.picture.terminal import DIM, line

    found = recipes.shipped()
    names = max((len(recipe.name) for recipe in found), default=0)
    axes = max((len(", ".join(recipe.axes)) for recipe in found), default=0)
    terminal = terminal_for(args.color)
    write_answer(
        [
            line(
                (recipe.name.ljust(names), "bold"),
                "  ",
                (", ".join(recipe.axes).ljust(axes), DIM),
                f"  {recipe.summary}",
            )
            for recipe in found
        ],
        terminal,
    )
    return EXIT_CLEAN
