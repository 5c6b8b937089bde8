"""List the recipes that `shardviz probe` knows, a line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardviz.errors import EXIT_CLEAN

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("--bugs", action="store_true", help="run every recreated bug and every quiet probe, and score")


def run(args: argparse.Namespace) -> int:
    """Print the recipes, or run those of the bugs and print how each was named."""
    if args.bugs:
        from shardviz.commands import _bugs

        return _bugs.run(args)
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
