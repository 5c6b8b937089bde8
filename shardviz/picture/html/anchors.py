"""Anchors that stay: they are made of the name of a tensor or a finding, so that a link outlives the next run.

Of identical layers it is that of the first; the page's script leads the names of the others there, too.
"""

from __future__ import annotations

import re
from hashlib import blake2b

MOST_CHARACTERS = 80

_OTHERS = re.compile(r"[^A-Za-z0-9_.-]+")


class Anchors:
    """The anchors of one page, each given once."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def of(self, kind: str, *names: str) -> str:
        """Return an anchor; a hash tells names apart that it does not spell as they are.

        Args:
            kind: What it leads to: `tensor`, `finding`.
            names: What it is called.
        """
        name = "-".join(filter(None, names))
        spelled = _OTHERS.sub("-", name).strip("-")[:MOST_CHARACTERS]
        digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
        plain = f"{kind}-{spelled}" if spelled == name else f"{kind}-{spelled}-{digest}"
        found, count = plain, 1
        while found in self._given:
            count += 1
            found = f"{plain}-{count}"
        self._given.add(found)
        return found
