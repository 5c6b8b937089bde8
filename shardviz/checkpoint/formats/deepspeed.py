"""Checkpoints of DeepSpeed's ZeRO: files that `torch.save` wrote, read without running them.

`mp_rank_*_model_states.pt` has the weights (under stage 3 their shapes), `zero_pp_rank_*_optim_states.pt` each
data-parallel rank's part of the flat buffers of masters and moments. `param_shapes` says in which order parameters are
in the buffers. Tried on DeepSpeed 0.19.8.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from shardviz.checkpoint.formats.archive import Archive, open_archive, strides_of
from shardviz.checkpoint.formats.headers import is_plain
from shardviz.checkpoint.formats.pickle_reader import PickledObject, dict_of
from shardviz.checkpoint.formats.torch_file import whole_tensor
from shardviz.checkpoint.formats.zero_buffers import MASTER, RankFile, Shapes, chunks_of, lay_out
from shardviz.checkpoint.records import ByteRange, Checkpoint, Problem, StoredTensor
from shardviz.errors import DumpError
from shardviz.explain.checkpoints.files import UnfinishedUniversalCheckpoint
from shardviz.text import counted, listed, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

LATEST = ("latest", "latest_universal")
"""Files that name the folder of a step; the first that is there counts."""

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d{1,6})_)?mp_rank_(?P<mp>\d{1,6})_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_)?(?:fp16_)?zero_pp_rank_(?P<dp>\d{1,6})_mp_rank_(?P<mp>\d{1,6})_optim_states\.pt")
_OTHER = re.compile(r"layer_.*-model_.*\.pt|layer_.*_expert_.*\.pt|expp_rank_.*\.pt")
FOLDER = "zero"
ENDING = ".pt"
MAX_PARAMETERS = 1 << 18
MAX_KINDS = 64
"""Files of one parameter."""


@dataclass
class _ModelPart:
    """The tensors in the files of one model-parallel rank, and problems with them."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def is_deepspeed(names: Iterable[str]) -> bool:
    """Whether a folder with these files is one of DeepSpeed's checkpoints, or of a step in one."""
    return any(name in LATEST or _MODEL.fullmatch(name) or _OPTIM.fullmatch(name) for name in names)


def read_deepspeed(path: Path) -> Checkpoint:
    """Read the tensors of a checkpoint's files and their places, but no elements.

    Args:
        path: A folder with the files, or one with a `latest` that names it.

    Raises:
        DumpError: There is no step in it, a file is damaged, or a file has what cannot be read safely.
    """
    folder = _step(path)
    names = sorted(one.name for one in folder.iterdir())
    models = {_numbers(match): name for name in names if (match := _MODEL.fullmatch(name))}
    optims = {_numbers(match): name for name in names if (match := _OPTIM.fullmatch(name))}
    if not models:
        raise DumpError(f"{folder} has no mp_rank_*_model_states.pt", "copy the whole checkpoint again")
    parts = sorted({mp for _, mp in models})
    tensors: dict[str, StoredTensor] = {}
    problems: list[Problem] = []
    for mp in parts:
        of_part = {dp: name for (dp, at), name in models.items() if at == mp}
        rank_files = _part(folder, of_part, {dp: name for (dp, at), name in optims.items() if at == mp})
        before = f"mp_rank_{mp:02d}." if len(parts) > 1 else ""
        tensors |= {before + name: replace(one, name=before + name) for name, one in rank_files.tensors.items()}
        problems += rank_files.problems
    if not optims and has_universal(folder):
        rank_files = _universal(folder, models)
        tensors |= rank_files.tensors
        problems += rank_files.problems
    if others := [name for name in names if _OTHER.fullmatch(name)]:
        some = listed(map(printable, others))
        problems.append(Problem("", f"{counted(len(others), 'file')} of pipeline layers or experts: {some}"))
    return Checkpoint(folder, "DeepSpeed ZeRO", tensors, problems=tuple(problems))


def _step(path: Path) -> Path:
    """Return the folder of the step that `latest` names; the folder itself without such a file."""
    latest = next((path / name for name in LATEST if (path / name).is_file()), None)
    if latest is None:
        return path
    try:
        with latest.open("rb") as file:
            name = file.read(256).decode().strip()
    except (OSError, ValueError) as error:
        raise DumpError(f"{latest} is damaged: {printable(str(error))}", "give the folder of a step") from error
    if not is_plain(name):
        raise DumpError(f"{latest} names a folder outside its own: {printable(name)}", "do not trust it")
    if not (path / name).is_dir():
        raise DumpError(f"{latest} names {printable(name)}, which is not there", "copy it, or give a step's folder")
    return path / name


def _numbers(match: re.Match[str]) -> tuple[int, int]:
    return int(match["dp"] or 0), int(match["mp"])


def _part(folder: Path, models: Mapping[int, str], optims: Mapping[int, str]) -> _ModelPart:
    """Return what one model-parallel rank's files have."""
    archives = {dp: open_archive(folder / name) for dp, name in models.items()}
    first = archives[min(archives)]
    state = dict_of(first.tree, first.path, "the file")
    found_here = _ModelPart()
    ranks = {dp: RankFile.read(open_archive(folder / name), name) for dp, name in optims.items()}
    shapes = _groups(state, first.path)
    unflattened = lay_out(ranks, shapes, _world(state, first.path), sorted(models) if len(models) > 1 else None)
    found_here.problems += [] if not ranks and has_universal(folder) else unflattened.problems
    is_3 = any(one.stage == 3 for one in ranks.values()) or _are_of_stage_3(models)
    for name, pickled in dict_of(state.get("module"), first.path, "module", optional=True).items():
        saved = whole_tensor(first, pickled, name, folder) if type(name) is str else None
        if saved is not None and (not is_3 or saved.size or not _is_partitioned(name, shapes, state)):
            found_here.tensors[printable(name)] = saved
    for (name, kind), (shape, dtype, chunks) in unflattened.tensors.items():
        # Under stage 3, whose module is empty, the masters are the weights.
        called = printable(name) if is_3 and kind == MASTER else f"optimizer.state.{printable(name)}.{kind}"
        found_here.tensors[called] = StoredTensor(called, shape, dtype, tuple(chunks), folder)
    _add_frozen(found_here, archives, folder)
    _add_shared(found_here, state)
    return found_here


def _are_of_stage_3(models: Mapping[Any, str]) -> bool:
    """Whether each data-parallel rank has a file of the model, though a module that is empty."""
    return any(name.startswith("zero_pp_rank_") for name in models.values())


def _universal(folder: Path, models: Mapping[tuple[int, int], str]) -> _ModelPart:
    """Return what a universal checkpoint has next to the model's files."""
    first = open_archive(folder / models[min(models)])
    state = dict_of(first.tree, first.path, "the file")
    shapes = {name: shape for group in _groups(state, first.path) for name, shape in group.items()}
    universal, weights = _ModelPart(), _are_of_stage_3(models)  # then the masters are the weights: the module is empty
    saved_names: set[str] = set()
    for name, kind, path in _files(folder / FOLDER):
        called = name if weights and kind == MASTER else f"optimizer.state.{name}.{kind}"
        universal.tensors[called] = _saved_of_file(called, path, folder, shapes.get(name) if kind != "step" else None)
        saved_names.add(name)
    if lost := [name for name in shapes if printable(name) not in saved_names]:
        text = f"{counted(len(lost), 'parameter')} of {len(shapes):,} have no folder in {FOLDER}/: "
        text += listed(map(printable, lost))
        universal.problems.append(Problem("", text, UnfinishedUniversalCheckpoint()))
    _add_shared(universal, state)
    return universal


def _is_partitioned(name: Any, shapes: list[dict[str, tuple[int, ...]]], state: dict[str, Any]) -> bool:
    """Whether stage 3 has a weight elsewhere: in the module it is empty."""
    frozen, shared = state.get("frozen_param_shapes"), state.get("shared_params")
    elsewhere = [*shapes, frozen if type(frozen) is dict else {}, shared if type(shared) is dict else {}]
    return any(name in one for one in elsewhere)


def _world(state: dict[str, Any], path: Path) -> int:
    size = state.get("dp_world_size")
    if type(size) is not int or not 1 <= size <= 1 << 20:
        raise DumpError(
            f"{path}: dp_world_size is not a number of ranks: {printable(repr(size))[:80]}", "copy it again"
        )
    return size


def _groups(state: dict[str, Any], path: Path) -> list[Shapes]:
    """Return the shapes of each group's parameters, in the order of its buffer."""
    groups = state.get("param_shapes")
    if type(groups) not in (list, type(None)):
        raise DumpError(f"{path}: param_shapes is not a list, but {type(groups).__name__}", "copy it again")
    return [_shapes(group, path) for group in groups or ()]


def _shapes(value: Any, path: Path) -> Shapes:
    shapes = dict_of(value, path, "param_shapes")
    for name, shape in shapes.items():
        is_shape = (
            type(shape) is tuple and len(shape) <= 32 and all(type(one) is int and 0 <= one < 1 << 40 for one in shape)
        )
        if type(name) is not str or not is_shape:
            raise DumpError(f"{path}: param_shapes[{printable(repr(name))[:100]}] is not a shape", "copy it again")
    return shapes


def _add_frozen(model_part: _ModelPart, archives: Mapping[int, Archive], folder: Path) -> None:
    """Add the frozen weights of stage 3: each rank's model file has a stretch of them."""
    for dp, archive in sorted(archives.items()):
        state = dict_of(archive.tree, archive.path, "the file")
        shapes = _shapes(state.get("frozen_param_shapes") or {}, archive.path)
        fragments = dict_of(state.get("frozen_param_fragments"), archive.path, "frozen_param_fragments", optional=True)
        for name, shape in shapes.items():
            pickled = fragments.get(name)
            stored = archive.tensor(pickled, name) if type(pickled) is PickledObject else None
            if stored is not None and len(stored.shape) == 1:
                start, place = dp * stored.shape[0], ByteRange(archive.path.name, stored.start, 0)
                chunks = chunks_of(shape, start, min(start + stored.shape[0], math.prod(shape)), place, stored.dtype)
                before = model_part.tensors.get(printable(name))
                old = before.chunks if before is not None and before.shape == shape else ()
                saved = StoredTensor(printable(name), shape, stored.dtype, (*old, *chunks), folder)
                model_part.tensors[saved.name] = saved


def _add_shared(model_part: _ModelPart, state: dict[str, Any]) -> None:
    """Add the names of tensors that are stored under another name."""
    shared = state.get("shared_params")
    for name, of in shared.items() if type(shared) is dict else ():
        if type(name) is str and type(of) is str and printable(of) in model_part.tensors:
            model_part.tensors.setdefault(
                printable(name), replace(model_part.tensors[printable(of)], name=printable(name))
            )


def has_universal(folder: Path) -> bool:
    """Whether a step has universal files; links aren't followed, they could leave the folder."""
    return (folder / FOLDER).is_dir() and not (folder / FOLDER).is_symlink()


def _files(root: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield each file with its parameter and kind of state; links are not followed."""
    folders = sorted(one for one in root.iterdir() if one.is_dir() and not one.is_symlink())
    if len(folders) > MAX_PARAMETERS:
        raise DumpError(f"{root} has more than {MAX_PARAMETERS:,} parameters", "give the folder of one step")
    for folder in folders:
        files = sorted(folder.iterdir())
        if len(files) > MAX_KINDS:
            raise DumpError(
                f"{folder} has {len(files):,} files of one parameter", "give a folder as DeepSpeed wrote it"
            )
        for path in files:
            if path.suffix == ENDING and path.is_file() and not path.is_symlink():
                yield printable(folder.name), printable(path.stem), path


def _saved_of_file(name: str, path: Path, folder: Path, shape: tuple[int, ...] | None) -> StoredTensor:
    """Return a file's tensor; a flat one in its parameter's shape, without its padding.

    Raises:
        DumpError: It has no tensor, or one that is not stored row by row.
    """
    archive = open_archive(path)
    pickled: Any = archive.tree.get("param") if type(archive.tree) is dict else archive.tree
    stored = archive.tensor(pickled, "param")
    if stored is None or stored.strides != strides_of(stored.shape):
        raise DumpError(f"{path} has no tensor, or one that is not stored row by row", "convert the checkpoint again")
    is_flat = shape is not None and len(stored.shape) == 1 and stored.shape[0] >= math.prod(shape)
    whole_shape = shape if is_flat and shape is not None else stored.shape
    place = ByteRange(str(path.relative_to(folder)), stored.start, 0)
    return StoredTensor(
        name,
        whole_shape,
        stored.dtype,
        tuple(chunks_of(whole_shape, 0, math.prod(whole_shape), place, stored.dtype)),
        folder,
    )
