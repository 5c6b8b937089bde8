"""Random tensors on random meshes to which relations are applied, without the code that finds them again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shardviz.layout.layout import FlatView, Layout
from shardviz.layout.mesh import Mesh
from shardviz.relate.relations import Pair
from shardviz.relate.tolerance import EPSILON, Bound

KINDS = ("exchange", "permute", "scale", "round", "pending", "order", "zeros", "offset", "turn")
EXACT = {"exchange", "permute", "scale", "order", "zeros", "turn"}
"""What can be done to ids too, which are compared with the bound 0."""
NARROW = Bound(4 * EPSILON["float32"])
"""How far values that were computed in float32 may be off."""


@dataclass(frozen=True)
class Made:
    """A pair to which relations were applied.

    Attributes:
        pair: The pair.
        kinds: What was applied.
    """

    pair: Pair
    kinds: frozenset[str]


def make(seed: int, kinds: frozenset[str]) -> Made | None:
    """Return a random pair to which relations were applied; None if one of them cannot be, or would change nothing."""
    rng = np.random.default_rng(seed)
    axes = ("dp", "fsdp", "tp")[: rng.integers(1, 4)]
    mesh = Mesh(axes, tuple(rng.integers(1, 5, len(axes)).tolist()))
    shape = tuple(rng.integers(4, 25, int(rng.integers(1, 4))).tolist())
    chains: list[list[str]] = [[] for _ in range(len(shape) + 1)]  # the last: axes that split nothing
    for axis in rng.permutation(axes).tolist():
        chains[rng.integers(len(chains))].append(axis)
    *splits, free = map(tuple, chains)
    claimed = Layout(mesh, shape, tuple(splits))
    layout = Layout(mesh, shape, tuple(chain[::-1] for chain in splits)) if "order" in kinds else claimed
    if "order" in kinds and layout.same_regions(claimed):
        return None
    is_exact = bool(rng.integers(2)) and kinds <= EXACT
    wanted = tensor(rng, shape, is_exact=is_exact)
    source = changed(rng, kinds, wanted)
    if source is None:
        return None
    held = {rank: part(source, layout, rank) for rank in mesh.ranks}
    if not spoiled(rng, kinds, held, mesh, free):
        return None
    if "turn" in kinds:
        if len(shape) < 2:
            return None
        order = rng.permutation(len(shape))
        wanted = wanted.transpose(np.argsort(order))
        if wanted.shape == shape and (order == range(len(shape))).all():
            return None
    bound = Bound() if is_exact else NARROW
    is_claimed = bool(rng.integers(4)) or bool(kinds & {"order", "exchange", "turn"})
    return Made(Pair(wanted, held, claimed if is_claimed else None, mesh, bound), kinds)


def tensor(rng: np.random.Generator, shape: tuple[int, ...], *, is_exact: bool) -> np.ndarray:
    """Return a wanted tensor: ids, or numbers that are drawn."""
    if is_exact:
        return np.arange(1.0, int(np.prod(shape)) + 1).reshape(shape)
    return rng.standard_normal(shape).astype(np.float32).astype(np.float64)


def changed(rng: np.random.Generator, kinds: frozenset[str], source: np.ndarray) -> np.ndarray | None:
    """Return a whole tensor to which what concerns all ranks was done; None if it changed nothing."""
    if "permute" in kinds:
        dim = int(rng.integers(source.ndim))
        order = rng.permutation(source.shape[dim])
        if (order == range(len(order))).all():
            return None
        source = source.take(order, dim)
    source = source * float(rng.choice([2, 0.5, 0.25, 3, 4, 1 / 3, -1, 8])) if "scale" in kinds else source
    source = source + float(rng.choice([1, -1, 0.5, 3])) if "offset" in kinds else source
    return bfloat16(source) if "round" in kinds else source


def spoiled(
    rng: np.random.Generator, kinds: frozenset[str], held: dict[int, np.ndarray], mesh: Mesh, free: tuple[str, ...]
) -> bool:
    """Do to what ranks hold what concerns some of them, and return whether that could be done."""
    first, second = rng.choice(mesh.ranks, 2).tolist()
    if "exchange" in kinds:
        if np.array_equal(held[first], held[second]):
            return False
        held[first], held[second] = held[second], held[first]
    if "zeros" in kinds:
        held[second] = np.zeros_like(held[second])
    terms_of = [axis for axis in free if mesh.axis_size(axis) > 1]
    if "pending" in kinds and not terms_of:
        return False
    for group in mesh.groups(terms_of[0]) if "pending" in kinds else ():
        terms = rng.standard_normal((len(group), *held[group[0]].shape))
        terms[0] += held[group[0]] - terms.sum(0)
        held |= dict(zip(group, terms, strict=True))
    if "noise" in kinds:
        held |= {rank: values * (1 + rng.uniform(-1, 1, values.shape) * 2.0**-24) for rank, values in held.items()}
    return True


def part(whole: np.ndarray, layout: Layout, rank: int) -> np.ndarray:
    """Return the elements of a rank by their row-major numbers."""
    region = layout.region_of_rank(rank)
    return whole.ravel()[region.flat_ids(whole.shape)].copy()


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Round to 8 significant bits, ties to even: only for numbers that bfloat16 has neither too large nor too small."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(mantissa * 256) / 256, exponent)


def flat(pair: Pair, offset: int, total: int) -> Pair:
    """Return a pair whose ranks hold ranges of a concatenation, as FSDP1's do, in the place of its own parts."""
    view = FlatView(pair.wanted.shape, offset)
    claimed = Layout(pair.mesh, (total,), (pair.mesh.axes,), flat=view)
    whole = pair.wanted.ravel()
    held = {rank: whole[region.flat_ids(whole.shape)] for rank, region in claimed.regions()}
    return replace(pair, wanted=whole, held=held, claimed=claimed)
