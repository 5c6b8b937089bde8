"""Compare two checkpoints through a map against reading both files, whole processes.

python tests/benchmarks/bench_diff.py    Llama with rotary and renames; joined and stacked experts; transposed ones
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from whole import compare, python, verdict

DIM, HIDDEN, HEAD, LAYERS, EXPERTS = 2048, 5632, 128, 6, 32
SMALL = 8
"""By what dims are divided to see what everything but the contents costs."""
READ = "import sys\nfor path in {!r}:\n    with open(path, 'rb') as file:\n        while file.read(1 << 24): pass"
DIFF = "from shardviz.cli import main; assert main(['diff', {!r}, {!r}, '--map', {!r}]) == 0"


def llama(dim: int, hidden: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    """Return Meta's and Hugging Face's tensors, and the map."""
    one, other = {}, {}
    for layer in range(LAYERS):
        for name, target in (("wq", "q_proj"), ("wk", "k_proj"), ("wv", "v_proj"), ("wo", "o_proj")):
            own = one[f"layers.{layer}.attention.{name}.weight"] = _weight(dim, dim)
            turned = own.view(-1, HEAD // 2, 2, dim).transpose(1, 2).reshape(dim, dim) if name in ("wq", "wk") else own
            other[f"model.layers.{layer}.self_attn.{target}.weight"] = turned
        for name, target, shape in (
            ("w1", "gate_proj", (hidden, dim)),
            ("w2", "down_proj", (dim, hidden)),
            ("w3", "up_proj", (hidden, dim)),
        ):
            own = one[f"layers.{layer}.feed_forward.{name}.weight"] = _weight(*shape)
            other[f"model.layers.{layer}.mlp.{target}.weight"] = own
    return one, other, "llama"


def joined(dim: int, hidden: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    """Return experts by themselves and on each other, gate beside up."""
    one = {f"e.{at}.{name}": _weight(hidden // 2, dim) for at in range(EXPERTS) for name in ("w1", "w3")}
    up = torch.stack([torch.cat([one[f"e.{at}.w1"], one[f"e.{at}.w3"]]) for at in range(EXPERTS)])
    return one, {"up": up}, "up = stack(cat(e.*.w1, e.*.w3))\n"


def transposed(dim: int, hidden: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    """Return experts on each other, and each of them transposed."""
    one = {"w": torch.stack([_weight(hidden // 2, dim) for _ in range(EXPERTS)])}
    return one, {"v": one["w"].transpose(1, 2)}, "v = transpose(w)\n"


def _weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float32).bfloat16()


def main() -> None:
    """Print the ratios."""
    for make in (llama, joined, transposed):
        with tempfile.TemporaryDirectory() as parent:
            large = _written(Path(parent) / "large", *make(DIM, HIDDEN))
            small = _written(Path(parent) / "small", *make(DIM // SMALL, HIDDEN // SMALL))
            _measure(make.__name__, large, small)


def _written(
    folder: Path, one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], rules: str
) -> tuple[str, str, str]:
    """Write two checkpoints and a map; return where they are."""
    folder.mkdir()
    paths = str(folder / "one.safetensors"), str(folder / "other.safetensors")
    for path, tensors in zip(paths, (one, other), strict=True):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    if "=" not in rules:
        return *paths, rules
    (folder / "my.map").write_text(rules)
    return *paths, str(folder / "my.map")


def _measure(what: str, large: tuple[str, str, str], small: tuple[str, str, str]) -> None:
    paths = list(large[:2])
    commands = [python(DIFF.format(*large)), python(DIFF.format(*small)), python(READ.format(paths)), python("pass")]
    compared, nothing, read, bare = compare(*commands)
    size = sum(Path(path).stat().st_size for path in paths) / 2**20
    print(f"{what}: {size:,.0f} MiB\ndiff: {compared}\nof small tensors: {nothing}\nreading both files: {read}")
    ratio = (compared.median - nothing.median) / (read.median - bare.median)
    verdict(f"{what}: diff / reading both files, without imports", ratio, 2)
    work = (compared.work - nothing.work) / (read.work - bare.work)
    verdict(f"{what}: the same in processor time, of all threads", work, 2)


if __name__ == "__main__":
    main()
