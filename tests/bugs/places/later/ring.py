"""Context parallel by blocks: attention to each rank's keys by itself, put together by the sums of exponents."""

from __future__ import annotations

from tests.bugs.places.fault import Fault, Program, spoiled
from tests.bugs.places.sequence import TEXT as SEQUENCE

OWN = SEQUENCE[SEQUENCE.index("    def forward(self, x):\n        q, k, v = self.q(x)") :]
OWN = OWN[: OWN.index("    def first(self, x)")]
BLOCKS = """    def forward(self, x):
        q, k, v = self.q(x), self.keys(self.k(x)), self.values(self.v(x))
        found = [self.block(q, *parts) for parts in zip(k.chunk(BLOCKS, 1), v.chunk(BLOCKS, 1))]
        return self.o(self.merged(found))

    def block(self, q, k, v):
        scores = q @ k.transpose(1, 2) / FEATURES**0.5
        sums = scores.logsumexp(-1, keepdim=True)
        return (scores - sums).exp() @ v, sums

    def merged(self, found):
        outs, sums = (torch.stack(parts) for parts in zip(*found))
        return (outs * (sums - sums.logsumexp(0)).exp()).sum(0)

"""
RING = Program(
    "attention by blocks, CP",
    "dp=1,cp=4",
    "BLOCKS = 4\n" + SEQUENCE.replace(OWN, BLOCKS).replace("randn(4, T", "randn(2, T"),
)


FAULTS = (
    Fault(
        "blocks averaged without their sums of exponents",
        RING,
        spoiled("layer.attn.merged = lambda found: torch.stack([one for one, _ in found]).mean(0)"),
        ("layers.1.attn",),
        ("attn",),
        ("not summed",),
    ),
    Fault(
        "the last block left out",
        RING,
        spoiled("merged = layer.attn.merged; layer.attn.merged = lambda found: merged(found[:-1])"),
        ("layers.1.attn",),
        ("attn",),
        ("not summed",),
    ),
)
