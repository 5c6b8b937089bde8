"""Programs with a fault in one module, the line that must be named, and their right twins.

The lines were written down before the judge was run for the first time. A case without a line must not name any.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.live.lines.programs import (
    ATTENTION,
    DTENSOR,
    EXPERTS,
    FUNCTIONAL,
    HEAD,
    IN_PLACE,
    LOOPED,
    NORMED,
    REPLACED,
    SEQUENCE,
    VOCABULARY,
)


@dataclass(frozen=True)
class Case:
    """A fault and its right twin.

    Attributes:
        name: What is wrong.
        program: The right program.
        edits: Pairs of a text that stands once in the program and what the wrong one has instead.
        line: What the line that must be named contains; empty if none may be named.
        mesh: The mesh.
        is_between: Whether the line is not named yet: the finding names two lines between which it is.
        head: The source before the program.
    """

    name: str
    program: str
    edits: tuple[tuple[str, str], ...]
    line: str
    mesh: str = "tp=2"
    is_between: bool = False
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
    Case(
        "statistics of the local columns",
        NORMED,
        (("squares = summed(squares, self.group, True)", "squares = squares * self.tp"),),
        "* self.tp",
    ),
    Case("no sum", NORMED, (("out = summed(out, self.group)\n", "\n"),), "out = out + self.bias"),
    Case(
        "bias before the sum",
        NORMED,
        (
            ("out = summed(out, self.group)\n", "out = out + self.bias\n"),
            ("        out = out + self.bias\n        return", "        out = summed(out, self.group)\n        return"),
        ),
        "out = out + self.bias",
    ),
    Case("sum twice", NORMED, (("x + out\n", "x + summed(out, self.group)\n"),), "x + summed(out"),
    Case(
        "sum without its backward",
        NORMED,
        (("squares = summed(squares, self.group, True)", "squares = summed(squares, self.group)"),),
        "squares = summed(",
    ),
    Case("no backward of the input", NORMED, (("given = copied(x, self.group)", "given = x"),), "F.linear(given"),
    Case("divided by the local width", NORMED, (("squares / 32", "squares / h.shape[-1]"),), "squares / "),
    Case(
        "norm of local features",
        NORMED,
        (("h = h * torch.rsqrt(squares / 32)", "h = F.rms_norm(h, h.shape[-1:])"),),
        "F.rms_norm",
    ),
    Case(
        "backward sums a whole gradient",
        NORMED,
        (("out = summed(out, self.group)\n", "out = summed(out, self.group, True)\n"),),
        "out = summed(",
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
        "gather along the wrong dim",
        VOCABULARY,
        (("gathered(logits, self.group, -1)", "gathered(logits, self.group, 1).view(*logits.shape[:2], -1)"),),
        "gathered(logits",
    ),
    Case(
        "softmax over a shard",
        VOCABULARY,
        (
            ("        chances = logits.softmax(-1)\n", ""),
            (
                "        logits = gathered(logits, self.group, -1)\n",
                "        chances = logits.softmax(-1)\n        logits = gathered(logits, self.group, -1)\n"
                "        chances = gathered(chances, self.group, -1)\n",
            ),
        ),
        "logits.softmax(-1)",
    ),
    Case(
        "rows of other ranks' tokens",
        VOCABULARY,
        (("rows = rows * inside[..., None]", "rows = rows * 1.0"),),
        "rows = F.embedding(",
    ),
    Case(
        "largest of a shard",
        VOCABULARY,
        (
            ("        tokens = logits.argmax(-1)\n", ""),
            (
                "        logits = gathered(logits, self.group, -1)\n",
                "        tokens = logits.argmax(-1)\n        logits = gathered(logits, self.group, -1)\n",
            ),
        ),
        "logits.argmax(-1)",
        is_between=True,
    ),
    Case(
        "positions counted within the part",
        SEQUENCE,
        (("at = torch.arange(length) + self.rank * length", "at = torch.arange(length)"),),
        "at = torch.arange(length)",
    ),
    Case(
        "mask counted within the part",
        SEQUENCE,
        (("mask = at[:, None] >= ", "mask = torch.arange(length)[:, None] >= "),),
        "mask = torch.arange(length)",
    ),
    Case(
        "an exponent made of the part's length",
        SEQUENCE,
        ((".softmax(-1)", ".softmax(-1).add(1) ** (1 / length)"),),
        "add(1) ** (1 / length)",
    ),
    Case(
        "running sum over a split sequence",
        SEQUENCE,
        (("q = F.linear(part + places[at], weight)", "q = F.linear(part.cumsum(1) + places[at], weight)"),),
        "part.cumsum(1)",
    ),
    Case(
        "tokens turned around within the part",
        SEQUENCE,
        (("q = F.linear(part + places[at], weight)", "q = F.linear(part.flip(1) + places[at], weight)"),),
        "part.flip(1)",
    ),
    Case(
        "the token before without the rank before",
        SEQUENCE,
        (
            (
                "q = F.linear(part + places[at], weight)",
                "q = F.linear(part + F.pad(part, (0, 0, 1, 0))[:, :-1], weight)",
            ),
        ),
        "F.pad(part, (0, 0, 1, 0))",
    ),
    Case(
        "gates of the first experts",
        EXPERTS,
        (("gates[..., self.rank * count : (self.rank + 1) * count]", "gates[..., :count]"),),
        "gates[..., :count]",
    ),
    Case(
        "softmax over a rank's experts",
        EXPERTS,
        (
            (".softmax(-1)\n", "\n"),
            ("(self.rank + 1) * count]\n", "(self.rank + 1) * count].softmax(-1)\n"),
        ),
        "own = gates",
    ),
    Case("gates of the first experts, in a loop", LOOPED, (("first + number, None", "number, None"),), "gate = gates["),
    Case(
        "residual within the sum, in place",
        IN_PLACE,
        (
            (
                "        out = summed(out, self.group)\n        out += x\n",
                "        out += x\n        out = summed(out, self.group)\n",
            ),
        ),
        "out += x",
    ),
    Case(
        "nonlinear before the sum, in place",
        IN_PLACE,
        (("out = F.linear(h, self.down)\n", "out = F.linear(h, self.down).tanh_().clone()\n"),),
        ".tanh_()",
    ),
    Case(
        "terms taken as the whole",
        DTENSOR,
        (("out.redistribute(placements=[Replicate()]).to_local()", "out.to_local()"),),
        "out = torch.tanh(out)",
    ),
    Case(
        "torch's cumsum of a split dim",
        DTENSOR,
        (("h = F.linear(x, self.up).relu()", "h = F.linear(x, self.up).cumsum(-1)"),),
        "cumsum(-1)",
    ),
    Case(
        "terms labeled as copies",
        DTENSOR,
        (
            (
                "out.redistribute(placements=[Replicate()])",
                "DTensor.from_local(out.to_local(), out.device_mesh, [Replicate()])",
            ),
        ),
        "DTensor.from_local(out.to_local()",
    ),
    Case(
        "average for a sum",
        FUNCTIONAL,
        (('all_reduce(total, "sum", self.group)', 'all_reduce(total, "avg", self.group)'),),
        '"avg"',
    ),
    Case(
        "mean of local columns",
        FUNCTIONAL,
        (('total = all_reduce(total, "sum", self.group)', "total = total * self.tp"),),
        "total = total * self.tp",
    ),
    Case(
        "replaced class, no sum",
        REPLACED,
        (("terms = summed(terms, self.group)\n", "\n"),),
        "terms + self.down.bias",
    ),
    Case(
        "replaced class, nonlinear twice",
        REPLACED,
        (("terms = F.linear(hidden, self.down.weight)", "terms = F.linear(torch.tanh(hidden), self.down.weight)"),),
        "F.linear(torch.tanh(hidden)",
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
"""Every case; the expectations of lines stand beside the edits."""
