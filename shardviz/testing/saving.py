"""Writes a test of a probe's layouts: `shardviz probe --save-test`. Needs no torch."""

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
    from shardviz.dump.records.base import Moment
    from shardviz.layout.mesh import Mesh
    from shardviz.probe_files import Probe

EXACT = {"float32": 1 << 24, "float16": 1 << 11, "bfloat16": 1 << 8}
"""Ids below this are exact in a dtype; other dtypes hold all ids, or none."""
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
"""For sharding that casts to a dtype which cannot hold every id: ids are written one digit per pass."""


def check_file(file: Path, *, force: bool) -> None:
    """Check that a test may be written to `file`.

    Raises:
        ShardvizError: The file exists and `force` was not given, or it is not a Python file.
    """
    if file.suffix != ".py":
        raise ShardvizError(f"{file} is not a Python file", "use a name that pytest collects, such as test_sharding.py")
    if file.exists() and not force:
        raise ShardvizError(f"{file} exists", "use --force to replace it, or choose another name")


def save_test(file: Path, dump: Dump, probe: Probe, mesh: Mesh) -> None:
    """Write a test that asserts a dump's layouts, and that ranks hold what they claim.

    Raises:
        ShardvizError: The file cannot be written.
    """
    text = text_of_test(file, dump, probe, mesh)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ShardvizError(f"cannot write {file}: {error.strerror}") from error


def text_of_test(file: Path, dump: Dump, probe: Probe, mesh: Mesh) -> str:
    """Return the text of the test that `save_test` writes."""
    stages = "STAGE_AXES" in probe.path.read_text(encoding="utf-8")
    in_passes = not _are_exact(dump, "stamped")
    return TEMPLATE.format(
        name=probe.name,
        mesh=mesh,
        torch=dump.files.run.torch,
        imports=_imports(file, probe, in_passes=in_passes),
        layouts="\n".join(f'    "{name}": {text},' for name, text in _layouts(dump)),
        axes=", ".join(f'"{axis}": {size}' for axis, size in zip(mesh.axes, mesh.shape, strict=True)),
        test=(CAPTURED if in_passes else STAMPED).format(
            build=probe.build,
            double="" if _are_exact(dump, "initial") else ".double()",
            stages=", stage_axes=probe.STAGE_AXES" if stages else "",
        ),
    )


def _are_exact(dump: Dump, moment: Moment) -> bool:
    """Whether the dtypes of a moment can hold every id."""
    last = max((stamp.last for stamp in dump.files.run.stamps), default=0)
    dtypes = {shard.body.dtype for tensor in dump.at(moment) for shard in tensor.shards.values()}
    return all(last < EXACT.get(dtype, last + 1) for dtype in dtypes)


def _imports(file: Path, probe: Probe, *, in_passes: bool) -> str:
    names = ["assert_layout", "assert_ordered", "spmd", *([] if in_passes else ["stamp"])]
    capture = "from shardviz import capture_sharding\n" if in_passes else ""
    if is_shipped(probe) or probe.module:
        package, _, name = (probe.module or f"shardviz.probes.{probe.name.replace('/', '.')}").rpartition(".")
        loaded = f"from {package} import {name} as probe\n" if package else f"import {name} as probe\n"
        return f"{capture}{loaded}from shardviz.testing import {', '.join(names)}\n"
    path = os.path.relpath(probe.path, file.resolve().parent)
    import_lines = f"{capture}from shardviz.testing import {', '.join(sorted([*names, 'load_probe']))}\n"
    load = f'probe = load_probe(Path(__file__).parent / "{path}", "{probe.build}")\n'
    return f"from pathlib import Path\n\n{import_lines}\n{load}"


def _layouts(dump: Dump) -> Iterator[tuple[str, str]]:
    """Yield a rule for each parameter; identical layers share one if its pattern is exact."""
    tensors = [tensor for tensor in dump.at("stamped") if tensor.role == "param"]
    texts = {name: _layout(tensor) for tensor in tensors for name in tensor.names}
    done: set[str] = set()
    for tensor in tensors:
        pattern = f"{tensor.fold.prefix}*{tensor.fold.suffix}"
        matched = {name for name in texts if fnmatchcase(name, pattern)}
        if len(tensor.names) > 1 and len({texts[name] for name in matched}) == 1 and not matched <= done:
            yield pattern, texts[tensor.names[0]]
            done |= matched
        for name in tensor.names:
            if name not in done:
                yield name, texts[name]
                done.add(name)


def _layout(tensor: Tensor) -> str:
    if len(tensor.claims) > 1:
        return "None"
    return f'"{write(tensor.claimed)}"' if tensor.claimed else f'"{list(tensor.first.body.local_shape)}"'
