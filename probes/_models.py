"""Small models that several probes share; none of them is aware of parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    import torch


class MLP(nn.Module):
    """Two linear layers: 12 to 24 features and back."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Blocks(nn.Module):
    """MLPs in a row, each added to its own input: a transformer without its attention."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): MLP() for number in range(num_layers)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = x + layer(x)
        return x
