"""`assert_transferred`: weights sent from a trainer to an engine, resharded or fused.

A fused tensor is judged whole: what stands in the place of a part, and how the parts were joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed, nn

from shardviz.checkpoint.maps.functions import views_in
from shardviz.checkpoint.maps.mapped_tensors import Op, has_padding, label_of, padding_in, padding_text
from shardviz.checkpoint.records import MemoryTensor
from shardviz.errors import ShardvizError
from shardviz.explain.testing.transfers import FusedCutOtherwise
from shardviz.live.capture.agreement import of_all_ranks, refuse_without_group, together
from shardviz.live.capture.lookup.by_reference import claimed_slice
from shardviz.live.capture.stamp import bits_of_tensor, dtype_name
from shardviz.live.claims.registry import of_tensor
from shardviz.testing.assertions.message import ShardAssertionError
from shardviz.testing.assertions.subjects import device_mesh_of
from shardviz.testing.trips.contents import (
    RankContents,
    contents_of,
    fill,
    old_entries,
    region_of,
    salt_of,
    sent_by_all,
)
from shardviz.testing.trips.judging import TargetTensor, TransferOutcome, findings_of, message_of, parts_of_all
from shardviz.testing.trips.pieces import (
    PieceCuts,
    dim_of_parts,
    entry_of,
    made_of,
    names_of,
    padded_by_rank,
    rules_of,
    without_padding,
)
from shardviz.testing.trips.placing import places
from shardviz.testing.trips.roundtrip import RoundTrip, refuse_unchecked
from shardviz.text import counted, listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.checkpoint.maps.language import Rule
    from shardviz.checkpoint.maps.mapped_tensors import Node
    from shardviz.explain.cause import Cause
    from shardviz.explain.finding import Finding
    from shardviz.live.claims.local import Local
    from shardviz.reference.files import Entry
    from shardviz.testing.trips.judging import PartOutcome
    from shardviz.testing.trips.pieces import AnyMap, TargetPiece

    Fused = tuple[str, Cause] | None

    """What a rank has in the place of a fused tensor, in words, and why."""


Weights = nn.Module | Mapping[str, torch.Tensor] | None
SENDER = "the source"


def assert_transferred(
    source: Weights,
    target: Weights,
    sync: Callable[[], object] | None = None,
    *,
    map: AnyMap | None = None,
    layouts: Mapping[str, str] | None = None,
    mesh: DeviceMesh | None = None,
    strict: bool = False,
) -> RoundTrip:
    """Assert that a target has a source's weights, each element in place. Every rank calls this.

    With `sync`, the source is filled with values that say where they belong and the target with others, `sync` is
    called, and the target is compared: what it did not write, what it wrote elsewhere, and what it took from another
    tensor is named with rank and rows. The source's own values are put back and sent again. Without `sync`, the target
    is compared with what the source has now.

    Args:
        source: The trainer's model, or its weights by name: DTensors, or whole tensors. None on ranks that have none.
        target: The engine's: DTensors, plain tensors that `layouts` describes, or whole ones. None on other ranks.
        sync: Sends the weights; called on every rank.
        map: What the target's tensors are made of, by pattern over its names, if names differ:
            `{"*.qkv_proj.weight": "cat(*.q_proj.weight, *.k_proj.weight, *.v_proj.weight)"}`; or a file of such lines.
            A target that is padded is `{"lm_head.weight": "pad(lm_head.weight, 32768)"}`, one that is made of a padded
            source `{"lm_head.weight": "slice(lm_head.weight, 0, 32000)"}`; what is padding is not compared.
        layouts: Layouts in the notation of the target's plain tensors, by pattern over its names:
            `{"*.qkv_proj.weight": "[*/tp, *]"}`. Where `cat` puts parts one after the other along a dim that is split,
            each part is split; a part may have a layout of its own: `{"*.qkv_proj.weight (*.k_proj.weight)": ...}`.
            A layout is that of the target's own size: with its padding, if the map has `pad`.
        mesh: The mesh of those layouts, on every rank of it; by default the test's, or that of the target's DTensors.
        strict: Fail, too, if something could not be checked.

    Returns:
        How many tensors were compared, and what could not be: the target's that nothing is sent to, and the source's
        of which nothing is made.

    Raises:
        ShardAssertionError: The target differs, or nothing could be compared.
        ShardvizError: The map names a tensor that is not there, or a layout does not fit.

    Example:
        @spmd(mesh={"tp": 2})
        def test_the_engine_gets_every_row(mesh):
            trainer, engine = build_trainer(mesh), build_engine(mesh)
            assert_transferred(
                trainer, engine, lambda: send(trainer, engine), mesh=mesh,
                map={"*.gate_up.weight": "cat(*.w1.weight, *.w3.weight)"},
                layouts={"*.gate_up.weight": "[*/tp, *]", "*.down.weight": "[*, */tp]", "*": "[*]"},
            )

        If gate and up are exchanged on rank 1, it fails with

            layers.0.gate_up.weight (layers.0.w1.weight): it has the values of layers.0.gate_up.weight ...
    """
    __tracebackhide__ = True
    refuse_without_group("call assert_transferred in a rank of a distributed job")
    device_mesh = mesh if mesh is not None else device_mesh_of(target if target is not None else {}, None)
    trip = Transfer(source, target, device_mesh, rules_of(map), dict(layouts or {}))
    with together():  # a sync that raises on one rank would leave the others waiting for it
        text, done = trip.after(sync) if sync is not None else trip.now()
    if text:
        raise ShardAssertionError(text)
    refuse_unchecked(done, strict=strict, what="weights")
    return done


@dataclass(frozen=True)
class Transfer:
    """One transfer of weights from a source to a target.

    Attributes:
        source: Where weights come from.
        target: Where they go.
        rules: What its tensors are made of.
        layouts: How its plain tensors are laid out.
    """

    source: Weights
    target: Weights
    mesh: DeviceMesh | None
    rules: tuple[Rule, ...]
    layouts: Mapping[str, str]

    def after(self, sync: Callable[[], object]) -> tuple[str, RoundTrip]:
        """Fill both sides, send, and compare. Every rank calls this."""
        source_contents, target_contents = weights_of(self.source), weights_of(self.target)
        sent = sent_by_all(source_contents)
        before = {name: local.values.clone() for name, local in source_contents.tensors.items()}
        salt = salt_of("sync", *sorted(sent))
        old = old_entries(target_contents, salt)
        fill(target_contents, old, 0)
        spoiled = {name: bits_of_tensor(local.values).copy() for name, local in target_contents.tensors.items()}
        rank = distributed.get_rank()
        own_entries = {name: sent[name].entry(salt, rank) for name in source_contents.tensors}
        refused = fill(source_contents, own_entries, 0)
        of_all_ranks(None)
        sync()
        of_all_ranks(None)
        entries = {
            name: saved
            for name, sent_tensor in sent.items()
            if not sent_tensor.each and name not in refused and (saved := sent_tensor.entry(salt, rank)) is not None
        }
        received = self._judge(weights_of(self.target), entries, spoiled)
        with torch.no_grad():
            for name, values in before.items():
                source_contents.tensors[name].values.copy_(values)
        sync()
        return received

    def now(self) -> tuple[str, RoundTrip]:
        """Compare the target with what the source has. Every rank calls this."""
        return self._judge(weights_of(self.target), _whole_source(weights_of(self.source)), {})

    def _judge(
        self, target_contents: RankContents, entries: Mapping[str, Entry], old: Mapping[str, NDArray[Any]]
    ) -> tuple[str, RoundTrip]:
        """Compare every rank's tensors of the target with the expected ones. Every rank calls this."""
        names = list(dict.fromkeys(name for of_rank in of_all_ranks(list(target_contents.tensors)) for name in of_rank))
        nodes = made_of(names, entries, self.rules)
        cut = PieceCuts(nodes, self.layouts, self.mesh)
        pieces, not_known = cut.of_rank(target_contents)
        of_all = {
            name: one for of_rank in of_all_ranks({n: p.of for n, p in pieces.items()}) for name, one in of_rank.items()
        }
        targets = {name: TargetTensor(cut.entry(*of)) for name, of in of_all.items()}
        targets |= {name: _of_piece(targets[name], piece, cut.node(*piece.of), old) for name, piece in pieces.items()}
        locals_ = {name: without_padding(piece.local, cut.node(*piece.of)) for name, piece in pieces.items()}
        parts = parts_of_all(locals_, targets)
        padded = [name for name, of in of_all.items() if has_padding(cut.node(*of))]
        fused, settled = fused_findings(cut, target_contents.tensors, pieces, parts)
        parts = {name: one for name, one in parts.items() if name not in settled}
        received = TransferOutcome(parts, dict.fromkeys(parts, "param"), (), "sync", SENDER, padded=padded)
        placed = places(locals_, targets, received.unplaced, None, SENDER) if received.unplaced else []
        findings = [*fused, *findings_of(received, placed)]
        unknown = [f"{name}: {why}" for of_rank in of_all_ranks(not_known) for name, why in of_rank.items()]
        notes = (*_unmatched(names, nodes, entries), *dict.fromkeys(unknown))
        texts = {name: padding_text(node) for name, node in nodes.items()}
        left_out = tuple(f"{name}: padded: {text} are not compared" for name, text in texts.items() if text)
        return message_of(findings), RoundTrip(len(of_all), 0, notes, left_out)


def _of_piece(target: TargetTensor, piece: TargetPiece, node: Node, old: Mapping[str, NDArray[Any]]) -> TargetTensor:
    """Return a piece's expected values, with this rank's earlier ones and its padding."""
    if not has_padding(node):
        return replace(target, old=_old_entry(piece, old))
    padded = partial(padded_by_rank, piece.local, node)
    return replace(target, old=_old_entry(piece, old), padding=partial(padding_in, node), padded=padded)


def _old_entry(piece: TargetPiece, old: Mapping[str, NDArray[Any]]) -> Callable[[], NDArray[Any]] | None:
    """Return what a piece was filled with before; None if that is not known."""
    bits = old.get(piece.of[0])
    return None if bits is None else lambda: bits[piece.cut]


def _unmatched(names: Sequence[str], nodes: Mapping[str, Node], entries: Mapping[str, Entry]) -> Iterator[str]:
    """Yield which tensors of either side have nothing on the other."""
    used = {name for one in nodes.values() for name in names_of(one)}
    if lone := [name for name in names if name not in nodes]:
        yield f"{counted(len(lone), 'tensor')} of the target: nothing is sent to {listed(lone)}"
    if lone := [name for name in entries if name not in used]:
        yield f"{counted(len(lone), 'tensor')} of the source: nothing is made of {listed(lone)}"


def weights_of(weights: Weights) -> RankContents:
    """Return this rank's weights of one side.

    Raises:
        ShardvizError: It is neither a module nor tensors by name.
    """
    if weights is None:
        return RankContents()
    if isinstance(weights, nn.Module):
        return contents_of(weights, None, None)
    if not isinstance(weights, Mapping):
        raise ShardvizError(f"a {type(weights).__name__} has no weights", "pass a module, or tensors by name")
    tensors = {name: of_tensor(name, "param", tensor) for name, tensor in weights.items()}
    return RankContents(
        {name: local for name, local in tensors.items() if not local.unknown},
        not_known={name: local.unknown for name, local in tensors.items() if local.unknown},
    )


def _whole_source(source_contents: RankContents) -> dict[str, Entry]:
    """Put the source's tensors together from all ranks, whole in memory. Every rank calls this."""
    own_parts = {}
    for name, local in source_contents.tensors.items():
        region = region_of(local)
        if region is not None and not local.flat:
            own_parts[name] = (local.shape, dtype_name(local.values.dtype), region, bits_of_tensor(local.values))
    entries: dict[str, Entry] = {}
    wholes: dict[str, NDArray[Any]] = {}
    for of_rank in of_all_ranks(own_parts):
        for name, (shape, dtype, region, bits) in of_rank.items():
            whole = wholes.setdefault(name, np.zeros(shape, bits.dtype))
            whole.reshape(-1)[region.flat_ids(shape).ravel()] = bits.ravel()
            entries[name] = MemoryTensor(name, dtype, whole)
    return entries


MOST_BLOCKS = 256
MOST_ROWS = 12
MOST_ORDERED = 4
"""Parts that are tried in every order."""


def fused_findings(
    cut: PieceCuts,
    target_locals: Mapping[str, Local],
    pieces: Mapping[str, TargetPiece],
    parts: Mapping[str, Sequence[PartOutcome]],
) -> tuple[list[Finding], set[str]]:
    """Return findings of whole fused tensors, and their parts' names. Every rank calls this.

    Args:
        parts: What became of each piece on every rank.
    """
    wrong = {name for name, ranks in parts.items() if any(one.fate in ("other", "swapped") for one in ranks)}
    groups: dict[str, dict[str, TargetPiece]] = {}
    own_fused: dict[str, tuple[Fused, tuple[str, ...]]] = {}
    for name, piece in pieces.items():
        if piece.of[1] is not None:
            groups.setdefault(piece.of[0], {})[name] = piece
        elif name in wrong and isinstance(node := cut.node(*piece.of), Op) and node.function == "interleave":
            own_fused[name] = _joined_not_interleaved(piece.local, node), (name,)
    own_fused |= {
        name: (_name_content(cut, target_locals[name], each), tuple(each))
        for name, each in groups.items()
        if wrong & each.keys()
    }
    fused: dict[str, dict[int, tuple[Fused, tuple[str, ...]]]] = {}
    for rank, of_rank in enumerate(of_all_ranks(own_fused)):
        for name, fused_here in of_rank.items():
            fused.setdefault(name, {})[rank] = fused_here
    findings, settled = [], set[str]()
    for name, ranks in fused.items():
        names = {one for _, each in ranks.values() for one in each}
        if (finding := _common_finding(name, names, ranks, parts)) is not None:
            findings.append(finding)
            settled |= names
    return findings, settled


def _common_finding(
    name: str,
    names: set[str],
    ranks: Mapping[int, tuple[Fused, tuple[str, ...]]],
    parts: Mapping[str, Sequence[PartOutcome]],
) -> Finding | None:
    """Return the finding of a fused tensor that has one thing on all ranks that have it wrong."""
    hit = sorted({one.rank for each in names for one in parts[each] if one.fate != "right"})
    words = {ranks[rank][0] for rank in hit if rank in ranks}
    if len(words) != 1 or (what := words.pop()) is None:
        return None
    held, cause = what
    total = len({one.rank for each in names for one in parts[each]})
    where = [f"{_part(each)} {one.text}" for each in sorted(names) for one in parts[each] if one.fate != "right"]
    text = f"{held}, on {len(hit):,} of {total:,} ranks"
    details = (f"wrong: {listed(where, MOST_ROWS)}",)
    return cause.finding(name, tuple(hit), text, kind="misordered", details=details)


def _name_content(cut: PieceCuts, local: Local, pieces: Mapping[str, TargetPiece]) -> Fused:
    """Name what a rank has instead of a fused tensor, and the cause; return None if unknown."""
    got = bits_of_tensor(local.values)
    name = next(iter(pieces.values())).of[0]
    whole = None
    with suppress(ShardvizError):  # a layout of parts need not be one of the whole
        whole = cut.fused(name, local)
    expected = claimed_slice(whole, cut.entry(name, None)) if whole is not None else None
    if expected is not None and np.array_equal(expected, got):
        return "the rank's rows are those of the whole, cut in one piece", FusedCutOtherwise("piece")
    right = [claimed_slice(piece.local, cut.entry(*piece.of)) for piece in pieces.values()]
    answers = [one for one in right if one is not None]
    return (
        next(_name_join(answers, got, cut.dim(name, local), list(pieces)), None) if len(answers) == len(right) else None
    )


def _joined_not_interleaved(local: Local, node: Op) -> Fused:
    """Name what a rank has if it is parts one after the other, if a map interleaves them; else return None."""
    got, wanted = bits_of_tensor(local.values), claimed_slice(local, entry_of(node))
    dim = dim_of_parts(node, node.shape)
    of = " and ".join(map(label_of, node.parts)) if len(node.parts) == 2 else "its parts"
    joined = FusedCutOtherwise("joined")
    whole = claimed_slice(local, entry_of(replace(node, function="cat", numbers=(dim,))))
    if whole is not None and np.array_equal(whole, got):
        return f"{of} stand one after the other", joined
    shapes = [part.shape for part in node.parts]
    blocks = node.numbers[1] if len(node.numbers) > 1 else shapes[0][dim]
    if wanted is None or blocks * wanted.shape[dim] % node.shape[dim]:
        return None
    blocks = blocks * wanted.shape[dim] // node.shape[dim]
    own_shapes = [
        (*wanted.shape[:dim], size[dim] * wanted.shape[dim] // node.shape[dim], *wanted.shape[dim + 1 :])
        for size in shapes
    ]
    views = views_in(wanted, "interleave", own_shapes, (dim, blocks)) if blocks else []
    parts = [view.reshape(shape) for view, shape in zip(views, own_shapes, strict=True)] if views else []
    return (
        (f"the rank's parts of {of} stand one after the other", joined)
        if parts and np.array_equal(np.concatenate(parts, dim), got)
        else None
    )


def _name_join(parts: list[NDArray[Any]], got: NDArray[Any], dim: int, names: list[str]) -> Iterator[tuple[str, Cause]]:
    """Yield how a rank joined its right parts: interleaved, or in a different order."""
    sizes = [part.shape[dim] for part in parts]
    for blocks in [one for one in range(2, math.gcd(*sizes) + 1) if math.gcd(*sizes) % one == 0][:MOST_BLOCKS]:
        views = views_in(got, "interleave", [part.shape for part in parts], (dim, blocks))
        if all(np.array_equal(view.reshape(part.shape), part) for view, part in zip(views, parts, strict=True)):
            rows = " and ".join(dict.fromkeys(f"{size // blocks:,}" for size in sizes))
            yield f"its parts come in turns, in blocks of {rows} along dim {dim}", FusedCutOtherwise("turns")
    for order in list(permutations(range(len(parts))))[1:] if len(parts) <= MOST_ORDERED else ():
        if np.array_equal(np.concatenate([parts[at] for at in order], dim), got):
            of = ", ".join(_part(names[at]) for at in order)
            yield f"its parts come in the order {of}", FusedCutOtherwise("order")


def _part(name: str) -> str:
    """Return what a part of a fused tensor is made of: `q` of `qkv (q)`."""
    return name.rpartition(" (")[2].rstrip(")")
