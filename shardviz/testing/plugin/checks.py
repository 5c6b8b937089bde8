"""Before a test runs on ranks: can it, here?"""

from __future__ import annotations

import pytest

from shardviz.errors import MeshError
from shardviz.testing.plugin.marks import spmd_of
from shardviz.text import counted


def check_item(item: pytest.Item) -> None:
    """Fail or skip a marked test that cannot run on ranks."""
    __tracebackhide__ = True
    spmd, wrong = None, ""
    try:
        spmd = spmd_of(item)
    except MeshError as error:
        wrong = str(error)
    if spmd is None:
        pytest.fail(wrong, pytrace=False)
    if not isinstance(item, pytest.Function):
        pytest.fail(
            f"{item.name} is marked with a mesh, but only functions and methods of plain classes run on ranks\n"
            "Hint: make the test a function",
            pytrace=False,
        )
    if (kind := _unittest_class(item)) is not None:
        pytest.fail(
            f"{kind}.{item.name} is a method of a unittest.TestCase, which cannot run on ranks\n"
            f"Hint: let {kind} be a plain class, with setup_method for setUp and assert for self.assertEqual",
            pytrace=False,
        )
    limit = item.config.getoption("shardviz_ranks")
    if limit is not None and spmd.mesh.size > limit:
        pytest.skip(f"mesh {spmd.mesh} has {counted(spmd.mesh.size, 'rank')}, --shardviz-ranks allows {limit}")


def _unittest_class(item: pytest.Function) -> str | None:
    import unittest

    return item.cls.__name__ if item.cls is not None and issubclass(item.cls, unittest.TestCase) else None
