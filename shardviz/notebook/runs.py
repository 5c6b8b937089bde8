"""What every run has, whatever it was read from: tensors by name, a report, a picture, and errors that are short."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

from shardviz.dump.find import ambiguity, hint_at_name
from shardviz.errors import ShardvizError
from shardviz.picture.display import HTML, Drawable, framed
from shardviz.text import counted, listed, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from rich.text import Text

    from shardviz.explain.finding import Finding
    from shardviz.layout.mesh import Mesh
    from shardviz.notebook.verdicts import FindingOfRun, ReportOfRun
    from shardviz.picture.text.terminal import Terminal

P = ParamSpec("P")
R = TypeVar("R")


def concise(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise `ShardvizError` as if from its caller; bugs keep their traceback."""

    @wraps(function)
    def called(*args: P.args, **options: P.kwargs) -> R:
        __tracebackhide__ = True  # pytest leaves this frame out
        try:
            return function(*args, **options)
        except ShardvizError as error:
            raise error.with_traceback(None) from None

    return called


T = TypeVar("T", bound=Drawable)


class UnknownTensorError(ShardvizError, KeyError):
    """No tensor has this name; the hint suggests one."""


class Tensors(Mapping[str, T]):
    """A run's tensors by name; a unique end of a name is enough.

    Attributes:
        num_results: How many of them are results of a step, and not tensors of the model.
    """

    num_results = 0

    def __init__(self, names: Iterable[str], made: Callable[[str], T], where: str) -> None:
        """Make a tensor when it is first asked for.

        Args:
            names: Their names, in order.
            made: Makes the tensor of a name.
            where: What errors call the run.
        """
        self._tensors: dict[str, T | None] = dict.fromkeys(names)
        self._made, self._where = made, where

    @concise
    def __getitem__(self, name: str) -> T:
        """Return the tensor of a name, or of the end of one.

        Raises:
            UnknownTensorError: No tensor has that name, or several end in it.
        """
        whole = self._full_name(name)
        tensor = self._tensors[whole] or self._made(whole)
        self._tensors[whole] = tensor
        return tensor

    def _full_name(self, name: str) -> str:
        if name in self._tensors:
            return name
        ends = [known for known in self._tensors if known.endswith(f".{name}")]
        if len(ends) == 1:
            return ends[0]
        if ends:
            raise UnknownTensorError(ambiguity(ends, name), f"write more of the name, as in {printable(ends[0])}")
        raise UnknownTensorError(f"{self._where} has no tensor {name!r}", hint_at_name(str(name), list(self._tensors)))

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        results = f" and {counted(self.num_results, 'result')} of a step" if self.num_results else ""
        tensors = counted(len(self) - self.num_results, "tensor")
        return f"<{tensors}{results}: {listed(map(printable, self))}>"

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)


class Run(Drawable, Generic[T]):
    """What `shardviz.load` opens: tensors by name, `run["layers.0.up.weight"]`, and a check.

    Attributes:
        path: Where it was read from.
        mesh: The mesh of the run; None for a checkpoint, which says nothing of ranks.
        num_ranks: The ranks of the run, those without a file too; 0 for a checkpoint.
        tensors: Its tensors by name.
    """

    path: Path
    mesh: Mesh | None = None
    num_ranks = 0
    tensors: Tensors[T]

    @cached_property
    @abstractmethod
    def _report(self) -> ReportOfRun:
        """The report, made once."""

    @abstractmethod
    def page(self) -> str:
        """Return the run as an HTML page: what `shardviz show -o run.html` writes."""

    @abstractmethod
    def report_page(self, finding: Finding | None = None) -> str:
        """Return its findings as an HTML page, or one of them alone."""

    @abstractmethod
    def report_lines(self, terminal: Terminal, finding: Finding | None = None) -> list[Text]:
        """Return its report as text, or one of its findings with what it is seen by."""

    def check(self) -> ReportOfRun:
        """Check it as `shardviz check` does; the result is kept."""
        return self._report

    @property
    def findings(self) -> tuple[FindingOfRun, ...]:
        """What is wrong, worst first: the findings of `check()`."""
        return self._report.findings

    def part(self, name: str) -> Drawable:
        """Return the tensor of a name.

        Raises:
            UnknownTensorError: No tensor has that name, or several end in it.
        """
        return self[name]

    def markup(self) -> Mapping[str, str]:
        """Return its page in a frame."""
        return {HTML: framed(self.page())}

    @concise
    def __getitem__(self, name: str) -> T:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.tensors)
