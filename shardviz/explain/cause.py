"""The base of all causes: their names, words and fields. Only this module makes findings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from shardviz.explain.finding import Finding, Kind, Severity
from shardviz.explain.templates import fill, pair_templates
from shardviz.text import as_clause

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform

else:

    def dataclass_transform(**_: object) -> Any:
        """Stand in for typing_extensions, which only a type checker needs here."""
        return lambda cls: cls


BY_NAME: dict[str, type[Cause]] = {}
"""Every cause by its name, in the order in which the modules of the catalogue define them."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True)
class Cause:
    """One cause; an instance, with its fields filled in, is the explanation of a finding.

    Every subclass is a frozen dataclass. Its docstring says what happens and why nothing raises; `why` and `how` are
    what a finding prints, as templates (`explain.templates`): `{axis}` is the field `axis` of the instance. The cause's
    name in JSON, in `shardviz explain` and in the contract is the class's name in kebab-case (`SameShard` is
    `same-shard`).

    Attributes:
        kinds: The kinds of finding that have this cause, the usual one first; a wrong value unless its class names
            another `kind` next to its base, or has several here.
        why: The most likely cause, one sentence, or several sentences, the likeliest first; empty if a mismatch is all
            that is known.
        how: The fix, in torch's own words; of several the last belongs to the last cause.
        references: Known upstream bugs of this kind: `pytorch#129229`.

    Example:
        >>> class IgnoredCoordinate(Cause, kind="duplicated"):
        ...     '''Every rank along an axis loads the same shard.'''
        ...
        ...     axis: str
        ...     why = "The loader ignores the rank's coordinate on {axis}"
        ...     how = "choose the shard by mesh.get_local_rank({axis!r})"
        >>> IgnoredCoordinate("tp").fix
        "choose the shard by mesh.get_local_rank('tp')"
    """

    name: ClassVar[str] = ""
    kinds: ClassVar[tuple[Kind, ...]] = ("wrong-value",)
    why: ClassVar[str | tuple[str, ...]] = ""
    how: ClassVar[str | tuple[str, ...]] = ""
    references: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, *, kind: Kind | None = None, listed: bool = True) -> None:
        """Make the cause a dataclass, and enter it in the catalogue under its name.

        Args:
            kind: The kind of all findings that have this cause.
            listed: Whether it is in the catalogue. Bases of causes aren't, nor is a cause that takes its name and page
                from the cause in its field.
        """
        dataclass(frozen=True)(cls)
        if kind is not None:
            cls.kinds = (kind,)
        if not listed:
            return
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()
        earlier = BY_NAME.setdefault(cls.name, cls)
        assert (earlier.__module__, earlier.__qualname__) == (cls.__module__, cls.__qualname__), cls.name
        BY_NAME[cls.name] = cls

    @property
    def id(self) -> str:
        """The name that a finding gives to programs."""
        return self.name

    def renamed(self, tensor: str, new: str) -> Cause:
        """Return the same cause with another name, or several names, in the place of a tensor's."""
        changed: dict[str, Any] = {}
        for name in (item.name for item in fields(self)):
            value = getattr(self, name)
            if name == "tensor" and value == tensor:
                changed[name] = new
            elif isinstance(value, Cause):
                changed[name] = value.renamed(tensor, new)
        return replace(self, **changed) if changed else self

    @property
    def rivals(self) -> tuple[Cause, ...]:
        """Other causes that fit as well, the likeliest first: the one in the field `or_else`, if the cause has that."""
        or_else = getattr(self, "or_else", None)
        return () if or_else is None else (or_else,)

    @property
    def ways(self) -> tuple[tuple[str, str], ...]:
        """Every cause that fits with its fix, likeliest first; an empty fix is that of the next."""
        own = [(fill(cause, self), fill(fix, self)) for cause, fix in pair_templates(self.why, self.how)]
        fitting = [way for way in own if way[0]] or own
        return tuple(dict.fromkeys((*fitting, *(rival.likeliest for rival in self.rivals))))

    @property
    def likeliest(self) -> tuple[str, str]:
        """The likeliest cause that fits with its fix: all that is said of it next to a likelier one."""
        cause, fix = self.ways[0]
        return cause, fix or self.fix

    @property
    def cause(self) -> str:
        """Every cause that fits in a line, with the case's own names and numbers in it."""
        return "; or: ".join(as_clause(cause) if at else cause for at, (cause, _) in enumerate(self.ways))

    @property
    def fix(self) -> str:
        """What to change in a line, with the case's own names and numbers in it."""
        return "; or ".join(dict.fromkeys(fix for _, fix in self.ways if fix))

    @property
    def advice(self) -> str:
        """The cause and the fix, as sentences of a paragraph."""
        return f"{self.cause}. Fix: {self.fix}" if self.fix else self.cause

    @property
    def page_command(self) -> str:
        """The command that prints its page."""
        return f"shardviz explain {self.id}"

    @property
    def refs(self) -> tuple[str, ...]:
        """Known upstream bugs of this kind."""
        return self.references

    def finding(
        self,
        tensor: str,
        ranks: tuple[int, ...],
        sentence: str,
        *,
        kind: Kind | None = None,
        severity: Severity = "error",
        details: tuple[str, ...] = (),
        claimed: str = "",
        held: str = "",
        intended: str = "",
        also: tuple[str, ...] = (),
        module: str = "",
        generic: bool = False,
    ) -> Finding:
        """Return the finding that has this cause; the arguments are the finding's own attributes.

        Args:
            kind: Which of the cause's kinds; the first if not given.
        """
        return Finding(
            kind or self.kinds[0],
            severity,
            tensor,
            ranks,
            sentence,
            explanation=self,
            details=details,
            claimed=claimed,
            held=held,
            intended=intended,
            refs=self.refs,
            also=also,
            module=module,
            generic=generic,
        )


WRONG: tuple[Kind, ...] = ("wrong-value", "wrong-scale", "unreduced-output", "unreduced-gradient")


class AtPlace(Cause, listed=False):
    """A cause that a line of the user's code shows.

    Attributes:
        place: The line, as `moe.py:83`.
    """

    place: str
    kinds = WRONG


class AtLine(AtPlace, listed=False):
    """A cause that a call in a line of the user's code shows.

    Attributes:
        function: What it calls.
    """

    function: str
