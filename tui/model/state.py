"""The state that all views share. The app keeps it, and it is all that views know of the app."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shardviz.check.diff import Difference

    from .beside import Compared
    from .document import Document
    from .navigation.selection import Selection


class State(Protocol):
    """The dumps that are shown, and the choices made in them. A view sets `selection`, and all views follow.

    Attributes:
        document: The dump; None until it is read.
        other_document: The dump to compare it with; None without one, and until it is read.
        difference: How the two differ; None until they are compared.
        compared: The dump beside a checkpoint; None without one, and until they are compared.
        selection: What is chosen.
    """

    document: Document | None
    other_document: Document | None
    difference: Difference | None
    compared: Compared | None
    selection: Selection

    async def action_show_view(self, name: str) -> None:
        """Show another view."""
