"""Rules that the types in `records` can't state: the parts of a dump must fit together.

After this, users of a record can trust every index, shape and name in it. Nothing is laid out here: the cost follows
the length of the files, whatever numbers they contain.
"""

from __future__ import annotations

import math
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from itertools import chain, pairwise, starmap
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shardviz.dump.arrays import NUMBERS_OF_A_SKETCH, hash_of, hash_of_bytes
from shardviz.dump.records.base import DIGEST_LENGTH, MAX_NUMBER
from shardviz.dump.records.tensors import Body
from shardviz.errors import DumpError, ShardvizError
from shardviz.layout.dtypes import is_dtype
from shardviz.layout.layout import FlatView, Layout, check_placements
from shardviz.layout.mesh import AXIS_NAME, Mesh
from shardviz.layout.notation import parse_intended
from shardviz.layout.placements import parse_placement
from shardviz.layout.region import length
from shardviz.text import cut_at_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from shardviz.dump.records.files import RankRecord, RunRecord
    from shardviz.dump.records.step import CallRecord
    from shardviz.dump.records.tensors import GatherRecord, LayoutRecord, MeshRecord, Stamp, TensorRecord
    from shardviz.dump.records.trace import SketchRecord
    from shardviz.layout.placements import Placement
    from shardviz.layout.region import Ranges

NOT_FINITE = ("nan", "inf", "-inf")

STORED_AS = {
    **{"float64": "<f8", "float32": "<f4", "float16": "<f2", "complex128": "<f8", "complex64": "<f4", "bool": "?"},
    **{f"{sign}int{bits}": f"<{sign or 'i'}{bits // 8}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
"""The bytes of an element, or of both parts of a complex one, as numpy writes them. It has no bfloat16."""

SHOWN = 20
"""Characters of a wrong value that a message shows."""

Item = TypeVar("Item")
Shape = tuple[int, ...]


def check_body(body: Body, layouts: Sequence[LayoutRecord]) -> None:
    """Make sure that the parts of a body fit each other and its layout.

    Raises:
        DumpError: They do not; the message names the field and what was expected.
    """
    numel_of("shape", body.shape)
    local_numel = numel_of("local_shape", body.local_shape)
    if not is_dtype(body.dtype):
        raise DumpError(f"dtype is {body.dtype[:SHOWN]!r}, expected a dtype such as float32")
    if body.layout is not None:
        layout = item_at("layout", body.layout, layouts)
        claimed = layout.flat.shape if layout.flat else layout.shape
        if body.shape != claimed:
            raise DumpError(f"shape is {list(body.shape)}, expected the {list(claimed)} of layouts[{body.layout}]")
    if body.held is not None:
        flat = body.layout is not None and layouts[body.layout].flat is not None
        if len(body.held) != (1 if flat else len(body.shape)):
            raise DumpError(f"held has {len(body.held)} dims, expected those of shape {list(body.shape)}")
        covered = tuple(map(length, body.held))
        if covered != body.local_shape:
            raise DumpError(f"held covers {list(covered)}, expected the local_shape {list(body.local_shape)}")
    if body.runs is not None and check_runs(body.runs) != local_numel:
        raise DumpError(f"runs count {check_runs(body.runs)} ids, expected those of {list(body.local_shape)}")
    check_one_form(body)
    if body.values is not None:
        _check_values(body)


def check_one_form(content: Body | GatherRecord) -> None:
    """Make sure that ids are written in one way: two could contradict each other."""
    forms = {"held": content.held is not None, "runs": content.runs is not None}
    if isinstance(content, Body):
        forms["dense"] = content.dense
    forms_there = [form for form, is_there in forms.items() if is_there]
    if len(forms_there) > 1:
        raise DumpError(f"{' and '.join(forms_there)} are both there, expected one form of the ids")


def check_spans(held: Sequence[Ranges], shapes: set[Shape], *, flat: bool = False) -> None:
    """Check that index ranges rise and lie within tensors of `shapes`, flattened if `flat`."""
    if any(start >= stop for ranges in held for start, stop in ranges):
        raise DumpError("held has a range that does not rise, expected [start, stop] with start below stop")
    ends = [max((stop for _, stop in ranges), default=0) for ranges in held]
    for shape in shapes:
        bounds = (math.prod(shape),) if flat else shape
        if len(held) != len(bounds) or any(end > size for end, size in zip(ends, bounds, strict=True)):
            raise DumpError(f"held ends at {ends}, expected indices of the stamped shape {list(shape)}")


def check_runs(runs: Sequence[tuple[int, int, int]] | None) -> int:
    """Return how many ids runs hold, which must all be ids."""
    for first, step, count in runs or ():
        last = first + step * (count - 1)
        if not -1 <= last <= MAX_NUMBER:
            raise DumpError(f"runs has {[first, step, count]}, expected ids from -1 to {MAX_NUMBER:,}")
    return sum(count for _, _, count in runs or ())


def _check_values(body: Body) -> None:
    """Make sure that nested lists have the local shape, and are made of numbers."""
    shape = _listed_shape(body)
    level: list[Any] = [body.values]
    for size in shape:
        if any(type(item) is not list or len(item) != size for item in level):
            raise DumpError(f"values are not nested lists of shape {list(shape)}")
        level = [inner for item in level for inner in item]
    if set(map(type, level)) <= {float, bool}:
        return
    for value in level:
        number = type(value) in (float, bool) or (type(value) is int and -(1 << 63) <= value < 1 << 64)
        if not number and not (type(value) is str and value in NOT_FINITE):
            raise DumpError(f"values hold {str(value)[:SHOWN]!r}, expected numbers or one of {', '.join(NOT_FINITE)}")


def leaves(values: Any) -> list[Any]:
    """Return the numbers of nested lists, row-major."""
    return [leaf for item in values for leaf in leaves(item)] if isinstance(values, list) else [values]


def digests_of(body: Body) -> tuple[str, ...]:
    """Return the digests of a body's values, in the current form and that of older versions.

    Empty if JSON doesn't determine the digest: there are no values, they include NaN (which was written in several
    ways), or numpy lacks the dtype.
    """
    numbers = _flat(body)
    stored = None if "nan" in numbers else _as_stored(numbers, body)
    if stored is None:
        return ()
    content = np.frombuffer(stored, np.uint8)
    return hash_of(content, body.dtype, body.local_shape), hash_of_bytes(content, body.dtype, body.local_shape)


def bits_of_values(body: Body) -> NDArray[Any] | None:
    """Return a body's values as unsigned integers in the local shape; None if they are unknown."""
    numbers = _flat(body)
    stored = None if body.dtype.startswith("complex") else _as_stored(numbers, body)
    if stored is None:
        return None
    width = len(stored) // max(len(numbers), 1) or 1
    return np.frombuffer(stored, f"<u{width}").reshape(body.local_shape)


def _as_stored(numbers: list[Any], body: Body) -> bytes | None:
    """Return a body's numbers as they lie in memory, of bfloat16 the upper half of a float32; None if unknown."""
    if str in set(map(type, numbers)):  # what JSON has no number for
        numbers = [float(value) if isinstance(value, str) else value for value in numbers]
    with suppress(KeyError, OverflowError, ValueError), np.errstate(over="ignore"):
        if body.values is not None and body.dtype == "bfloat16":
            return (np.array(numbers, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
        return np.array(numbers, STORED_AS[body.dtype]).tobytes() if body.values is not None else None
    return None


def _flat(body: Body) -> list[Any]:
    """Return a body's numbers, row-major; none if it has no values."""
    level: list[Any] = [body.values]
    for _ in _listed_shape(body) if body.values is not None else ():
        level = [inner for item in level for inner in item]
    return level


def _listed_shape(body: Body) -> Shape:
    """Return the shape of a body's nested lists, in which a complex number is a pair."""
    return (*body.local_shape, 2) if body.dtype.startswith("complex") else body.local_shape


def numel_of(field: str, shape: Shape) -> int:
    """Return how many elements a shape has.

    Raises:
        DumpError: More than a dump may number.
    """
    numel = math.prod(shape)
    if numel > MAX_NUMBER:
        raise DumpError(f"{field} is {list(shape)}, expected at most {MAX_NUMBER:,} elements")
    return numel


def item_at(field: str, index: int, of: Sequence[Item]) -> Item:
    """Return the item at an index that a file names.

    Raises:
        DumpError: There is none.
    """
    if index >= len(of):
        raise DumpError(f"{field} is {index}, expected an index below {len(of)}")
    return of[index]


MAX_NAMES = 1 << 20
"""A rank file names at most this many tensors, folded ones counted one by one."""

MAX_CHARS = 1 << 26
"""The names of a rank file are together at most this long, written out one by one."""

MAX_VERSION = 100
"""Characters of a package's version, which is shown as it is."""

Place = tuple[str, str]
"""The parts before and after a name's number."""


@lru_cache(maxsize=64)
def mesh_of(record: MeshRecord) -> Mesh:
    """Build the mesh that a record describes.

    Raises:
        ShardvizError: It describes none.
    """
    if not record.ranks:
        raise DumpError("a mesh names its ranks")
    return Mesh(record.axes, record.shape, record.ranks)


def layout_of(record: LayoutRecord, mesh: Mesh) -> Layout:
    """Build the layout that a record's placements claim."""
    flat = FlatView(record.flat.shape, record.flat.offset) if record.flat else None
    layout = Layout.from_placements(mesh, record.shape, _placements(record.placements), flat)
    if not record.own_axes:
        return layout
    if len(set(record.own_axes) & set(mesh.axes)) != len(record.own_axes):
        raise DumpError(
            f"own_axes are {', '.join(record.own_axes)}, expected some of {', '.join(mesh.axes)}, each once"
        )
    return replace(layout, own_axes=record.own_axes)


@lru_cache(maxsize=1024)
def _placements(texts: tuple[str, ...]) -> tuple[Placement, ...]:
    return tuple(map(parse_placement, texts))


@contextmanager
def _within(field: str, index: int | None = None) -> Iterator[None]:
    """Say in which field something was wrong."""
    try:
        yield
    except ShardvizError as error:
        at = field if index is None else f"{field}[{index}]"
        raise DumpError(f"{at}: {error.message}") from error


def _each(field: str, items: Iterable[Item], check: Callable[[Item], object]) -> None:
    """Check every item and name the index of the wrong one; a `with` per item costs more."""
    index = -1
    try:
        for index, record in enumerate(items):  # noqa: B007
            check(record)
    except ShardvizError as error:
        raise DumpError(f"{field}[{index}]: {error.message}") from error


class StampedShapes:
    """The shapes of a run's stamped tensors, looked up by the folds in rank files."""

    def __init__(self, stamps: Sequence[Stamp]) -> None:
        self._by_place: dict[Place, dict[int | None, Shape]] = {}
        self._found: dict[tuple[Place, Ranges], set[Shape]] = {}
        for stamp in stamps:
            prefix, number, suffix = cut_at_number(stamp.name)
            self._by_place.setdefault((prefix, suffix), {})[number] = stamp.shape

    def of(self, place: Place, numbers: Ranges) -> set[Shape]:
        """Return the shapes of the stamped tensors at a place, with one of the given numbers."""
        if (place, numbers) not in self._found:
            at = self._by_place.get(place, {})
            inside: Iterable[int | None] = (
                chain.from_iterable(starmap(range, numbers))
                if length(numbers) < len(at)  # a file may name more numbers than any run has
                else (one for one in at if one is not None and any(first <= one < end for first, end in numbers))
            )
            self._found[place, numbers] = {at[number] for number in (None, *inside) if number in at}
        return self._found[place, numbers]


def check_run(run: RunRecord) -> None:
    """Make sure that the parts of `run.json` fit each other.

    Raises:
        DumpError: They do not; the message names the field and what was expected.
    """
    for field, version in (("shardviz", run.shardviz), ("torch", run.torch)):
        if not (version.isprintable() and len(version) <= MAX_VERSION):
            raise DumpError(f"{field} is {version[:SHOWN]!r}, expected a version of at most {MAX_VERSION} characters")
    if run.mesh is not None:
        with _within("mesh"):
            _check_mesh(run.mesh, run.num_ranks)
    _check_stamps(run.stamps)
    for pattern, text in run.intended.items():
        with _within(f"intended[{pattern!r}]"):
            parse_intended(text)


def check_rank(record: RankRecord, run: RunRecord, stamped: StampedShapes) -> None:
    """Make sure that the parts of a rank's file fit each other and the run.

    Raises:
        DumpError: They do not; the message names the field and what was expected.
    """
    if record.num_ranks != run.num_ranks:
        raise DumpError(f"num_ranks is {record.num_ranks}, expected the {run.num_ranks} of run.json")
    if record.rank >= run.num_ranks:
        raise DumpError(f"rank is {record.rank}, expected less than the {run.num_ranks} ranks of run.json")
    meshes = []
    for index, mesh in enumerate(record.meshes):
        with _within("meshes", index):
            meshes.append(_check_mesh(mesh, run.num_ranks))
    _check_positions(record, meshes)
    _each("layouts", record.layouts, lambda layout: _check_layout(layout, item_at("mesh", layout.mesh, meshes)))
    _each("bodies", record.bodies, lambda body: check_body(body, record.layouts))
    _check_tensors(record, stamped)
    _each("collectives", record.collectives, lambda collective: _check_axes(collective.axes))
    _each("calls", record.calls, lambda call: _check_call(call, run.num_ranks))
    _each("sketches", record.sketches, _check_sketch)
    for index, gathered in enumerate(record.gathered):
        with _within("gathered", index):
            prefix, number, suffix = cut_at_number(gathered.name)
            numbers = () if number is None else ((number, number + 1),)
            check_runs(gathered.runs)
            check_one_form(gathered)
            if gathered.held is not None:
                check_spans(gathered.held, stamped.of((prefix, suffix), numbers))


@lru_cache(maxsize=64)
def _check_mesh(record: MeshRecord, num_ranks: int) -> Mesh:
    mesh = mesh_of(record)
    last = max(mesh.ranks)
    if last >= num_ranks:
        raise DumpError(f"ranks name rank {last}, expected ranks below {num_ranks}")
    return mesh


def _check_stamps(stamps: Sequence[Stamp]) -> None:
    by_name = {stamp.name: stamp for stamp in stamps}
    taken_ids = []
    for index, stamp in enumerate(stamps):
        with _within("stamps", index):
            if by_name[stamp.name] is not stamp:
                raise DumpError(f"name {stamp.name!r} is repeated, expected each name once")
            numel = numel_of("shape", stamp.shape)
            if not stamp.tied_to:
                taken_ids.append((stamp.first, numel, index))
            elif stamp.tied_to not in by_name or by_name[stamp.tied_to].first != stamp.first:
                raise DumpError(f"tied_to is {stamp.tied_to!r}, expected a stamp whose ids start at {stamp.first}")
    for (first, numel, index), (following, _, next_index) in pairwise(sorted(taken_ids)):
        if first + numel > following:
            taken = f"the {first} to {first + numel - 1} of stamps[{index}]"
            raise DumpError(f"stamps[{next_index}]: ids count from {following}, expected none of {taken}")


def _check_positions(record: RankRecord, meshes: Sequence[Mesh]) -> None:
    for index, position in enumerate(record.positions):
        with _within("positions", index):
            mesh = item_at("mesh", position.mesh, meshes)
            shape = mesh.shape
            for field, place in (("coord", position.coord), ("group_ranks", position.group_ranks)):
                if len(place) != len(shape) or any(at >= size for at, size in zip(place, shape, strict=True)):
                    raise DumpError(f"{field} is {list(place)}, expected a place on a mesh of {list(shape)}")
            if record.rank not in mesh:
                raise DumpError(f"mesh is {position.mesh}, expected a mesh that rank {record.rank} is on")
            if position.coord != mesh.coord_of(record.rank):
                expected = f"{list(mesh.coord_of(record.rank))}, the place of rank {record.rank} on the mesh"
                raise DumpError(f"coord is {list(position.coord)}, expected {expected}")


def _check_call(call: CallRecord, num_ranks: int) -> None:
    if not call.ranks or len(set(call.ranks)) < len(call.ranks) or max(call.ranks) >= num_ranks:
        raise DumpError(f"ranks is {str(list(call.ranks))[:SHOWN]}, expected ranks below {num_ranks}, each once")


def _check_sketch(sketch: SketchRecord) -> None:
    if sketch.numbers and len(sketch.numbers) != NUMBERS_OF_A_SKETCH:
        raise DumpError(f"numbers are {len(sketch.numbers)}, expected none or {NUMBERS_OF_A_SKETCH}")


@lru_cache(maxsize=4096)
def _check_axes(axes: tuple[str, ...]) -> None:
    for axis in axes:
        if not AXIS_NAME.fullmatch(axis):
            raise DumpError(f"axes name {axis[:SHOWN]!r}, expected letters, digits and _")


@lru_cache(maxsize=4096)
def _check_layout(layout: LayoutRecord, mesh: Mesh) -> None:
    total = numel_of("shape", layout.shape)
    with _within("placements"):
        check_placements(mesh, layout.shape, _placements(layout.placements))
    if layout.flat is not None:
        numel = numel_of("flat.shape", layout.flat.shape)
        if len(layout.shape) != 1 or layout.flat.offset + numel > total:
            raise DumpError(
                f"flat is {numel} elements from {layout.flat.offset}, expected a part of shape {list(layout.shape)}"
            )


Names = dict[tuple[str, str, str, str], list[tuple[int, int]]]
"""For the text around a number, a role and a moment: the numbers that were named."""


def _check_tensors(record: RankRecord, stamped: StampedShapes) -> None:
    names_seen: Names = {}
    digests: dict[int, tuple[str, ...]] = {}
    total = chars = 0

    def check(tensor: TensorRecord) -> None:
        nonlocal total, chars
        count = length(tensor.numbers) or 1
        total += count
        chars += count * (len(tensor.name) + len(tensor.suffix))
        if total > MAX_NAMES:
            raise DumpError(f"numbers bring the names to {total:,}, expected at most {MAX_NAMES:,}")
        if chars > MAX_CHARS:
            raise DumpError(f"names are {chars:,} characters written out, expected at most {MAX_CHARS:,}")
        _check_tensor(tensor, record, stamped, names_seen)
        _check_digests(tensor, record, digests)

    _each("tensors", record.tensors, check)
    for (prefix, suffix, role, moment), spans in names_seen.items():
        if any(before[1] > after[0] for before, after in pairwise(sorted(spans))):
            name = f"{prefix}*{suffix}" if suffix or spans[0][0] >= 0 else prefix
            raise DumpError(f"tensors: {role} {name!r} {moment} appears twice, expected each name once")


def _check_tensor(tensor: TensorRecord, record: RankRecord, stamped: StampedShapes, names_seen: Names) -> None:
    body = item_at("body", tensor.body, record.bodies)
    prefix, numbers, suffix = _place(tensor.name, tensor.numbers, tensor.suffix)
    count = length(tensor.numbers) or 1
    if tensor.digests and len(tensor.digests) != count * DIGEST_LENGTH:
        raise DumpError(f"digests has {len(tensor.digests)} digits, expected {count} * {DIGEST_LENGTH}")
    if body.held is not None:
        flat = body.layout is not None and record.layouts[body.layout].flat is not None
        check_spans(body.held, stamped.of((prefix, suffix), numbers), flat=flat)
    names_seen.setdefault((prefix, suffix, body.role, body.moment), []).extend(numbers or ((-1, 0),))


def _check_digests(tensor: TensorRecord, record: RankRecord, digests_seen: dict[int, tuple[str, ...]]) -> None:
    """Make sure that digests match the values; `digests_seen` has the bodies seen before."""
    if not tensor.digests:
        return
    if tensor.body not in digests_seen:
        digests_seen[tensor.body] = digests_of(record.bodies[tensor.body])
    expected = digests_seen[tensor.body]
    count = len(tensor.digests) // DIGEST_LENGTH
    if expected and tensor.digests not in [digest * count for digest in expected]:
        raise DumpError(f"digests are not the {expected[0]} of the values in bodies[{tensor.body}]")


@lru_cache(maxsize=4096)
def _place(name: str, numbers: Ranges, suffix: str) -> tuple[str, Ranges, str]:
    """Return a record's name as the part before its numbers, the numbers, and the part after."""
    if not numbers:
        if suffix:
            raise DumpError(f"suffix is {suffix!r}, expected none without numbers")
        prefix, number, suffix = cut_at_number(name)
        return prefix, () if number is None else ((number, number + 1),), suffix
    if any(start >= stop for start, stop in numbers):
        raise DumpError("numbers has a range that does not rise, expected [start, stop] with start below stop")
    if cut_at_number(f"{name}0{suffix}") != (name, 0, suffix):
        raise DumpError(f"name is {name!r}, expected the part before the first number of the full name")
    return name, numbers, suffix
