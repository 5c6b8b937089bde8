"""Programs with a fault in a module, a loss, a step or an optimizer, the line to be named, and their right twins.

One for each way in which ranks record lines; of fifty others the contract has what ranks recorded, and of their twins.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.live.lines.programs import ATTENTION, BY_HAND, DTENSOR, HEAD, NORMED, STEP_HEAD, TRUSTED, VOCABULARY


@dataclass(frozen=True)
class Case:
    """A fault and its right twin.

    Attributes:
        name: What is wrong.
        program: The right program.
        edits: Pairs of a text that stands once in the program and what the wrong one has instead.
        line: What the line that must be named contains.
        mesh: The mesh.
        head: The source before the program.
    """

    name: str
    program: str
    edits: tuple[tuple[str, str], ...]
    line: str
    mesh: str = "tp=2"
    head: str = HEAD

    @property
    def right(self) -> str:
        """The right twin's source."""
        return self.head + self.program

    @property
    def wrong(self) -> str:
        """The wrong program's source."""
        text = self.right
        for right, wrong in self.edits:
            assert text.count(right) == 1, f"{self.name}: {right!r} stands {text.count(right)} times"
            text = text.replace(right, wrong)
        return text


CASES = (
    Case("no sum", NORMED, (("out = summed(out, self.group)\n", "\n"),), "out = out + self.bias"),
    Case(
        "sum without its backward",
        NORMED,
        (("squares = summed(squares, self.group, True)", "squares = summed(squares, self.group)"),),
        "squares = summed(",
    ),
    Case(
        "global number of heads on a shard",
        ATTENTION,
        (
            ("q = q.view(rows, length, self.heads // self.tp, -1)", "q = q.view(rows, length, self.heads, -1)"),
            ("k = k.view(rows, length, self.heads // self.tp, -1)", "k = k.view(rows, length, self.heads, -1)"),
            ("v = v.view(rows, length, self.heads // self.tp, -1)", "v = v.view(rows, length, self.heads, -1)"),
        ),
        ".view(rows, length, self.heads, -1)",
    ),
    Case(
        "scale by the local number of features",
        ATTENTION,
        (("math.sqrt(q.shape[-1])", "math.sqrt(self.q.shape[0] / 4)"),),
        "self.q.shape[0] / 4",
    ),
    Case(
        "heads and features exchanged",
        ATTENTION,
        (
            ("(weights @ v).transpose(1, 2).reshape", "(weights @ v).reshape"),
            (
                "v = v.view(rows, length, self.heads // self.tp, -1).transpose(1, 2)",
                "v = v.view(rows, length, self.heads // self.tp, -1).transpose(1, 2) if self.tp == 1 else "
                "v.view(rows, length, -1, self.heads // self.tp).permute(0, 3, 1, 2)",
            ),
        ),
        "v.view(rows, length, -1,",
    ),
    Case(
        "terms taken as the whole",
        DTENSOR,
        (("out.redistribute(placements=[Replicate()]).to_local()", "out.to_local()"),),
        "out = torch.tanh(out)",
    ),
    Case(
        "sum over the wrong axis",
        NORMED,
        (
            (
                'self.group, self.rank = mesh["tp"].size(), mesh.get_group("tp")',
                'self.group, self.rank = mesh["tp"].size(), mesh.get_group("dp")',
            ),
        ),
        "squares = summed(",
        "dp=2,tp=2",
    ),
)
"""Faults in a module; the expectations of lines stand beside the edits."""


def _case(name: str, program: str, right: str, wrong: str, line: str, mesh: str = "2") -> Case:
    return Case(name, program, ((right, wrong),), line, mesh, head=STEP_HEAD)


STEP_CASES = (
    _case(
        "loss: own exponentials",
        VOCABULARY,
        "    normal = Sum.apply(logits.exp().sum(-1), group).log()\n",
        "    normal = logits.exp().sum(-1).log()\n",
        "normal = logits.exp().sum(-1).log()",
    ),
    _case(
        "step: no average",
        BY_HAND,
        "        p.grad /= dist.get_world_size(group)\n",
        "",
        "dist.all_reduce(p.grad, group=group)",
    ),
    _case(
        "optimizer: trust by shard",
        TRUSTED,
        "norm_of(weight, mesh) / norm_of(grad, mesh)",
        "norm_of(weight, None) / norm_of(grad, None)",
        "return square.sqrt()",
    ),
)
"""A fault in each part of a training step."""
