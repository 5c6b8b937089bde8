"""A classifier whose hidden layer is split over all ranks; it also runs as one process."""

import os

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional


class MLP(nn.Module):
    def __init__(self, rank, size):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)
        self.up.weight = nn.Parameter(self.up.weight.detach().chunk(size)[rank].clone())
        self.down.weight = nn.Parameter(self.down.weight.detach().chunk(size, 1)[rank].clone())

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))  # every rank has its own terms of the sum here


class Model(nn.Module):
    def __init__(self, rank, size):
        super().__init__()
        self.layers = nn.ModuleList(MLP(rank, size) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
if size > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = Model(rank, size)
x, labels = torch.randn(8, 16), torch.randint(0, 4, (8,))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    loss = functional.cross_entropy(model(x), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    print(f"loss {loss.item():.4f}")
if size > 1:
    dist.destroy_process_group()
