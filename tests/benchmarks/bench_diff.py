"""Compare two checkpoints through a map against reading both files, whole processes; and the memory that it takes.

python tests/benchmarks/bench_diff.py    Llama with rotary and renames; joined and stacked experts; transposed ones
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from whole import compare, peak_memory_of_children, python, verdict

DIM, HIDDEN, HEAD, LAYERS, EXPERTS = 2048, 5632, 128, 6, 8
READ = "import sys\nfor path in {!r}:\n    with open(path, 'rb') as file:\n        while file.read(1 << 24): pass"
EMPTY = "from shardviz.commands.common import checkpoints; import shardviz.checkpoint.compare"
DIFF = "from shardviz.cli import main; assert main(['diff', {!r}, {!r}, '--map', {!r}]) == 0"


def llama() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    """Return Meta's and Hugging Face's tensors, and the map."""
    one, other = {}, {}
    for layer in range(LAYERS):
        for name, target in (("wq", "q_proj"), ("wk", "k_proj"), ("wv", "v_proj"), ("wo", "o_proj")):
            own = one[f"layers.{layer}.attention.{name}.weight"] = _weight(DIM, DIM)
            turned = own.view(-1, HEAD // 2, 2, DIM).transpose(1, 2).reshape(DIM, DIM) if name in ("wq", "wk") else own
            other[f"model.layers.{layer}.self_attn.{target}.weight"] = turned
        for name, target, shape in (
            ("w1", "gate_proj", (HIDDEN, DIM)),
            ("w2", "down_proj", (DIM, HIDDEN)),
            ("w3", "up_proj", (HIDDEN, DIM)),
        ):
            own = one[f"layers.{layer}.feed_forward.{name}.weight"] = _weight(*shape)
            other[f"model.layers.{layer}.mlp.{target}.weight"] = own
    return one, other, "llama"


def joined() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    """Return experts by themselves and on each other, gate beside up."""
    one = {f"e.{at}.{name}": _weight(HIDDEN // 2, DIM) for at in range(EXPERTS) for name in ("w1", "w3")}
    up = torch.stack([torch.cat([one[f"e.{at}.w1"], one[f"e.{at}.w3"]]) for at in range(EXPERTS)])
    return one, {"up": up}, "up = stack(cat(e.*.w1, e.*.w3))\n"


def transposed() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    """Return experts on each other, and each of them transposed."""
    one = {"w": torch.stack([_weight(HIDDEN // 2, DIM) for _ in range(EXPERTS)])}
    return one, {"v": one["w"].transpose(1, 2)}, "v = transpose(w)\n"


def _weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32).bfloat16()


def main() -> None:
    """Print the ratios."""
    for make in (llama, joined, transposed):
        with tempfile.TemporaryDirectory() as parent:
            _measure(make.__name__, Path(parent), *make())


def _measure(what: str, folder: Path, one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], rules: str) -> None:
    paths = [str(folder / f"{name}.safetensors") for name in ("one", "other")]
    for path, tensors in zip(paths, (one, other), strict=True):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    if "=" in rules:
        (folder / "my.map").write_text(rules)
        rules = str(folder / "my.map")
    largest = max(tensor.numel() * tensor.element_size() for tensor in (*one.values(), *other.values()))
    del one, other
    compared, read, nothing, bare = compare(
        python(DIFF.format(*paths, rules)), python(READ.format(paths)), python(EMPTY), python("pass")
    )
    ratio = (compared.median - nothing.median) / (read.median - bare.median)
    size = sum(Path(path).stat().st_size for path in paths) / 2**20
    print(f"{what}: {size:,.0f} MiB, diff {compared}, reading both files {read}, imports {nothing}")
    verdict(f"{what}: diff / reading both files, without the imports", ratio, 2)
    print(
        f"largest tensor: {largest / 2**20:,.0f} MiB, peak of any child: {peak_memory_of_children() / 2**20:,.0f} MiB"
    )


if __name__ == "__main__":
    main()
