"""Every private torch API that shardviz uses is called from here, and nowhere else.

Each function's docstring says which torch versions it was tried on.
"""

from __future__ import annotations


def make_ranks_of_threads() -> None:
    """Give each thread of this process a process group world of its own, backend "threaded"; there is no way back.

    Tried on torch 2.4.1, 2.13.0 and 2.15.0.
    """
    import torch
    from torch.testing._internal.distributed import multi_threaded_pg

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
