"""Versions that dumps and `--version` state."""

from __future__ import annotations

from importlib import metadata

import shardviz
from shardviz.versions import package_version


def test_shardviz_tells_its_version():
    assert shardviz.__version__ == metadata.version("shardviz")


def test_a_package_that_is_not_installed_has_none():
    assert package_version("no-package-of-this-name") == ""
