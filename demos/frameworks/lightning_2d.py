"""Trains by Lightning's ModelParallelStrategy, FSDP2 over tensor parallelism: the script knows nothing of shardviz."""

import lightning
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))

    def configure_model(self):
        mesh = self.device_mesh
        parallelize_module(self.model, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(self.model, mesh=mesh["data_parallel"])

    def training_step(self, batch):
        return self.model(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def main():
    from lightning.pytorch.strategies import ModelParallelStrategy

    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2),
        max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(8, 16), batch_size=4))


if __name__ == "__main__":
    main()
