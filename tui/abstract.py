"""Apps and widgets that are not whole by themselves: none can be made before a subclass defines what is abstract."""

from __future__ import annotations

from abc import ABCMeta

from textual.message_pump import _MessagePumpMeta


class Abstract(ABCMeta, _MessagePumpMeta):
    """The metaclass of Textual's classes that have abstract methods; `ABC` alone has another one than they do."""
