"""The examples in docstrings are right."""

import doctest
import pkgutil
from importlib import import_module

import pytest

import shardviz.layout

LAYOUT = pkgutil.iter_modules(shardviz.layout.__path__, "shardviz.layout.")
MODULES = ["shardviz.text", *(module.name for module in LAYOUT)]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_right(name):
    assert doctest.testmod(import_module(name)).failed == 0


def test_the_public_functions_have_examples():
    tests = [test for name in MODULES for test in doctest.DocTestFinder().find(import_module(name))]
    shown = {test.name.removeprefix("shardviz.") for test in tests if test.examples}
    assert shown >= {
        *("layout.mesh.Mesh", "layout.mesh.parse_mesh", "layout.layout.Layout", "layout.layout.Layout.from_placements"),
        *("layout.notation.parse", "layout.notation.write", "layout.region.Region", "layout.routes.cheapest"),
        *("layout.routes.gathering", "layout.placements.parse_placements", "text.fold"),
        *("layout.placements.parse_placement", "layout.placements.spell", "layout.region.region_of"),
        "layout.routes.ring",
        *("layout.splits.chunk", "layout.splits.slice_ranges", "layout.region.merge_ranges"),
    }
