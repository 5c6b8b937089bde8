"""A test file for what a probe saw: `shardviz probe --save-test`. Written without torch."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError
from shardviz.layout.notation import write
from shardviz.probe_files import is_shipped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardviz.dump.dump import Dump, Tensor
    from shardviz.dump.records import Moment
    from shardviz.layout.mesh import Mesh
    from shardviz.probe_files import Probe

EXACT = {"float32": 1 << 24, "float16": 1 << 11, "bfloat16": 1 << 8}
"""Ids below this are exact in a dtype; the others hold them all, or none."""
TEMPLATE = '''"""Where {name} puts every weight.

As `shardviz probe` saw it on mesh {mesh} with torch {torch}.
"""

{imports}
LAYOUTS = {{
{layouts}
}}


@spmd(mesh={{{axes}}})
{test}'''
STAMPED = """def test_every_weight_is_where_it_was(mesh):
    model = probe.{build}(){double}
    stamps = stamp(model)
    model = probe.parallelize(model, mesh) or model
    assert_layout(model, LAYOUTS)
    assert_ordered(model, stamps=stamps{stages})
"""
CAPTURED = """def test_every_weight_is_where_it_was(mesh, shard_dump):
    capture_sharding(probe.{build}, probe.parallelize, shard_dump, mesh=mesh{stages})
    assert_layout(shard_dump, LAYOUTS)
    assert_ordered(shard_dump)
"""
"""Where sharding casts to a dtype that does not hold every id: they are written a digit a pass."""


def check_file(file: Path, *, force: bool) -> None:
    """Make sure that a test may be written to `file`.

    Raises:
        ShardvizError: It is there and `force` was not given, or it is no name that pytest collects.
    """
    if file.suffix != ".py":
        raise ShardvizError(f"{file} is no Python file", "name it as pytest wants it: test_sharding.py")
    if file.exists() and not force:
        raise ShardvizError(f"{file} exists", "give --force to replace it, or another name")


def save_test(file: Path, dump: Dump, recipe: Probe, mesh: Mesh) -> None:
    """Write a test that asserts the layouts of a dump, and that what ranks hold is what they claim.

    Raises:
        ShardvizError: The file cannot be written.
    """
    text = written(file, dump, recipe, mesh)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ShardvizError(f"cannot write {file}: {error.strerror}") from error


def written(file: Path, dump: Dump, recipe: Probe, mesh: Mesh) -> str:
    """Return the text of the test that `save_test` writes."""
    stages = "STAGE_AXES" in recipe.path.read_text(encoding="utf-8")
    in_passes = not _are_exact(dump, "stamped")
    return TEMPLATE.format(
        name=recipe.name,
        mesh=mesh,
        torch=dump.files.run.torch,
        imports=_imports(file, recipe, in_passes=in_passes),
        layouts="\n".join(f'    "{name}": {text},' for name, text in _layouts(dump)),
        axes=", ".join(f'"{axis}": {size}' for axis, size in zip(mesh.axes, mesh.shape, strict=True)),
        test=(CAPTURED if in_passes else STAMPED).format(
            build=recipe.build,
            double="" if _are_exact(dump, "initial") else ".double()",
            stages=", stage_axes=probe.STAGE_AXES" if stages else "",
        ),
    )


def _are_exact(dump: Dump, moment: Moment) -> bool:
    """Whether the dtypes of a moment hold every id."""
    last = max((stamp.last for stamp in dump.files.run.stamps), default=0)
    dtypes = {shard.body.dtype for tensor in dump.at(moment) for shard in tensor.shards.values()}
    return all(last < EXACT.get(dtype, last + 1) for dtype in dtypes)


def _imports(file: Path, recipe: Probe, *, in_passes: bool) -> str:
    names = ["assert_layout", "assert_ordered", "spmd", *([] if in_passes else ["stamp"])]
    capture = "from shardviz import capture_sharding\n" if in_passes else ""
    if is_shipped(recipe) or recipe.module:
        package, _, name = (recipe.module or f"shardviz.probes.{recipe.name.replace('/', '.')}").rpartition(".")
        probe = f"from {package} import {name} as probe\n" if package else f"import {name} as probe\n"
        return f"{capture}{probe}from shardviz.testing import {', '.join(names)}\n"
    path = os.path.relpath(recipe.path, file.resolve().parent)
    ours = f"{capture}from shardviz.testing import {', '.join(sorted([*names, 'load_probe']))}\n"
    load = f'probe = load_probe(Path(__file__).parent / "{path}", "{recipe.build}")\n'
    return f"from pathlib import Path\n\n{ours}\n{load}"


def _layouts(dump: Dump) -> Iterator[tuple[str, str]]:
    """Yield a rule for each parameter; one for layers that are alike, where its pattern matches nothing else."""
    tensors = [tensor for tensor in dump.at("stamped") if tensor.role == "param"]
    texts = {name: _layout(tensor) for tensor in tensors for name in tensor.names}
    told: set[str] = set()
    for tensor in tensors:
        pattern = f"{tensor.fold.prefix}*{tensor.fold.suffix}"
        matched = {name for name in texts if fnmatchcase(name, pattern)}
        if len(tensor.names) > 1 and len({texts[name] for name in matched}) == 1 and not matched <= told:
            yield pattern, texts[tensor.names[0]]
            told |= matched
        for name in tensor.names:
            if name not in told:
                yield name, texts[name]
                told.add(name)


def _layout(tensor: Tensor) -> str:
    if len(tensor.by_claim) > 1:
        return "None"
    return f'"{write(tensor.claimed)}"' if tensor.claimed else f'"{list(tensor.first.body.local_shape)}"'
