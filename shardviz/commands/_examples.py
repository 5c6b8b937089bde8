"""The examples that `shardviz COMMAND --help` ends with."""

from __future__ import annotations

EXAMPLES_OF: dict[str, tuple[str, ...]] = {
    "probe": (
        "shardviz probe tp_fsdp --mesh 2,4",
        "shardviz probe path/to/my_model.py --mesh fsdp=2,tp=4 -o mine.shardviz",
    ),
    "probes": ("shardviz probes", "shardviz probes --bugs"),
    "check": (
        "shardviz check tp_fsdp-2x4.shardviz",
        "shardviz check tp_fsdp-2x4.shardviz --format github",
        "shardviz check tp_fsdp-2x4.shardviz --format junit > shardviz.xml",
    ),
    "show": (
        "shardviz show tp_fsdp-2x4.shardviz",
        "shardviz show tp_fsdp-2x4.shardviz up.weight -o weight.svg",
        "shardviz show tp_fsdp-2x4.shardviz -o run.html",
        "shardviz show tp_fsdp-2x4.shardviz --memory",
    ),
    "view": ("shardviz view tp_fsdp-2x4.shardviz", "shardviz view before.shardviz after.shardviz"),
    "diff": ("shardviz diff before.shardviz after.shardviz",),
    "explain": (
        'shardviz explain "[12/tp/fsdp, 12]" --mesh fsdp=2,tp=4',
        'shardviz explain "(Shard(0), Replicate())" --shape 12,12 --mesh 2,4',
    ),
    "mesh": ("shardviz mesh 2,4 --axes fsdp,tp", "shardviz mesh pp=2,fsdp=2,tp=4 --all"),
    "audit": ("shardviz audit", "shardviz audit --mesh 2,2 --max-size 8 -o repros"),
    "completion": (
        'eval "$(shardviz completion bash)"                                   in ~/.bashrc',
        'eval "$(shardviz completion zsh)"                                    in ~/.zshrc, after compinit',
        "shardviz completion fish > ~/.config/fish/completions/shardviz.fish",
    ),
}
