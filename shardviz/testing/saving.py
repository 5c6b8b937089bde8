"""A test file for what a probe saw: `shardviz probe --save-test`. Written without torch."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shardviz.errors import ShardvizError
from shardviz.notation import write
from shardviz.recipes import is_shipped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardviz.dump.tensors import Model, Tensor
    from shardviz.mesh import Mesh
    from shardviz.recipes import Recipe

EXACT_FLOAT32 = 1 << 24
TEMPLATE = '''"""Where {name} puts every weight, as `shardviz probe` saw it on mesh {mesh} with torch {torch}."""

{imports}
LAYOUTS = {{
{layouts}
}}


@spmd(mesh={{{axes}}})
def test_every_weight_is_where_it_was(mesh):
    model = probe.{build}(){double}
    stamp(model)
    model = probe.parallelize(model, mesh) or model
    assert_layout(model, LAYOUTS)
    assert_ordered(model)
'''


def check_file(file: Path, *, force: bool) -> None:
    """Make sure that a test may be written to `file`.

    Raises:
        ShardvizError: It is there and `force` was not given, or it is no name that pytest collects.
    """
    if file.suffix != ".py":
        raise ShardvizError(f"{file} is no Python file", "name it as pytest wants it: test_sharding.py")
    if file.exists() and not force:
        raise ShardvizError(f"{file} exists", "give --force to replace it, or another name")


def save_test(file: Path, model: Model, recipe: Recipe, mesh: Mesh) -> None:
    """Write a test that asserts the layouts of a dump, and that what ranks hold is what they claim.

    Raises:
        ShardvizError: The file cannot be written.
    """
    text = written(file, model, recipe, mesh)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ShardvizError(f"cannot write {file}: {error.strerror}") from error


def written(file: Path, model: Model, recipe: Recipe, mesh: Mesh) -> str:
    """Return the text of the test that `save_test` writes."""
    last = max((id_ for id_ in model.id_owners[0]), default=0)
    return TEMPLATE.format(
        name=recipe.name,
        mesh=mesh,
        torch=model.dump.run.torch,
        imports=_imports(file, recipe),
        layouts="\n".join(f'    "{name}": {text},' for name, text in _layouts(model)),
        axes=", ".join(f'"{axis}": {size}' for axis, size in zip(mesh.axes, mesh.shape, strict=True)),
        build=recipe.build,
        double=".double()" if last >= EXACT_FLOAT32 else "",
    )


def _imports(file: Path, recipe: Recipe) -> str:
    ours = "from shardviz.testing import assert_layout, assert_ordered, spmd, stamp\n"
    if is_shipped(recipe) or recipe.module:
        package, _, name = (recipe.module or f"shardviz.probes.{recipe.name.replace('/', '.')}").rpartition(".")
        return f"from {package} import {name} as probe\n{ours}" if package else f"import {name} as probe\n{ours}"
    path = os.path.relpath(recipe.path, file.resolve().parent)
    load = f'probe = load_probe(Path(__file__).parent / "{path}", "{recipe.build}")\n'
    ours = ours.replace("assert_ordered, spmd", "assert_ordered, load_probe, spmd")
    return f"from pathlib import Path\n\n{ours}\n{load}"


def _layouts(model: Model) -> Iterator[tuple[str, str]]:
    """Yield a rule for each parameter; one for a fold of layers where its pattern matches no other name."""
    tensors = [tensor for tensor in model.stage("stamped") if tensor.role == "param"]
    every = {name for tensor in tensors for name in tensor.names}
    for tensor in tensors:
        text = _layout(tensor)
        pattern = f"{tensor.fold.prefix}*{tensor.fold.suffix}"
        alone = {name for name in every if fnmatchcase(name, pattern)} == set(tensor.names)
        names = [pattern] if len(tensor.names) > 1 and alone else tensor.names
        yield from ((name, text) for name in names)


def _layout(tensor: Tensor) -> str:
    if len(tensor.by_claim) > 1:
        return "None"
    return f'"{write(tensor.claimed)}"' if tensor.claimed else f'"{list(tensor.first.body.local_shape)}"'
