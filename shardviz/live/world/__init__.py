"""Launch ranks on this machine, or join torchrun's, and run a task on each.

The launching process never imports torch; only ranks do. `launch` is the front door.
"""

from shardviz.live.world.failures import RankFailedError
from shardviz.live.world.launching import launch
from shardviz.live.world.protocol import World
from shardviz.live.world.starting import prepare
from shardviz.live.world.torchrun import is_first_to_report, run_joined, torchrun_world

__all__ = ["RankFailedError", "World", "is_first_to_report", "launch", "prepare", "run_joined", "torchrun_world"]
