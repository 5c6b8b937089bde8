"""Twelve experts, each by itself, and a converter that joins them: the way a listing of files sorts their names."""

import torch
from convert import save

torch.manual_seed(1)
single = {f"experts.{at}.{name}.weight": torch.randn(16, 8) for at in range(12) for name in ("w1", "w3")}
order = sorted({name.split(".")[1] for name in single})  # as text: 0 1 10 11 2 ...
joined = [torch.cat([single[f"experts.{at}.{name}.weight"] for name in ("w1", "w3")]) for at in order]
save("single", single)
save("joined", {"mlp.gate_up_proj": torch.stack(joined)})
