"""Versions of installed packages, without importing them."""

from __future__ import annotations

from importlib import metadata


def package_version(package: str) -> str:
    """Return a package's version; empty if it is not installed, as when shardviz runs from its sources."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


__version__ = package_version("shardviz")
