"""A transformer as language models are today: grouped heads, rotary positions, RMSNorm, a gated MLP, an embedding."""

LLAMA = '''
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

HEADS, GROUPS, SIZE, WIDE, LAYERS, WORDS, TOKENS, ROWS = 4, 2, 4, 24, 2, 20, 8, 8
FEATURES = HEADS * SIZE
TIED, RECOMPUTED, MIXED, RESHARD = False, "", False, True
SPLIT = ("fsdp",)
BATCH_AXES = ("fsdp",)


def rotated(x):
    """Turn pairs of features by angles that grow with the position of a token."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    one, other = x[..., :half], x[..., half:]
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wo = nn.Linear(FEATURES, FEATURES, bias=False), nn.Linear(FEATURES, FEATURES, bias=False)
        self.wk, self.wv = (nn.Linear(FEATURES, GROUPS * SIZE, bias=False) for _ in range(2))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in (self.wq, self.wk, self.wv))
        k, v = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (k, v))
        found = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.wo(found.transpose(1, 2).flatten(-2))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(FEATURES, WIDE, bias=False) for _ in range(2))
        self.down = nn.Linear(WIDE, FEATURES, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(FEATURES, eps=1e-5), Attention()
        self.norm2, self.mlp = nn.RMSNorm(FEATURES, eps=1e-5), Gated()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, FEATURES)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(FEATURES, eps=1e-5)
        self.head = nn.Linear(FEATURES, WORDS, bias=False)
        if TIED:
            self.head.weight = self.embed.weight

    def forward(self, words):
        x = self.embed(words)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=RECOMPUTED == "reentrant") if RECOMPUTED else layer(x)
        return self.head(self.norm(x))


def build():
    return Llama()


def batch():
    return torch.randint(WORDS, (ROWS, TOKENS))


def loss(model, words):
    return functional.cross_entropy(model(words)[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten())


def parallelize(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if MIXED else None
    options = {"mesh": mesh[SPLIT], "reshard_after_forward": RESHARD} | ({"mp_policy": policy} if policy else {})
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)

'''
