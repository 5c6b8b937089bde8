"""Every private torch API that shardviz uses is called from here, and nowhere else.

Each function's docstring names the torch versions it was tried on.
"""

from __future__ import annotations

from shardviz.live.compat.ddp import (
    ddp_alone,
    ddp_buckets,
    has_ddp,
    is_made_in_first_step,
    looks_for_unused,
    only_in_first_step,
)
from shardviz.live.compat.fakes import (
    UnwrappedMode,
    answered_alone,
    fake_mode,
    fakes_converted,
    futures_answered,
    has_known_value,
    is_fake,
    know_fakes,
    new_fakes,
)
from shardviz.live.compat.fsdp import (
    dividing_float64_once,
    flat_gradients_reduced,
    flat_params,
    flat_params_without_memory,
    fsdp_units,
    held_back,
    wide_reductions,
    without_pinned_memory,
)
from shardviz.live.compat.meshes import (
    flatten_mesh,
    local_of,
    placement_of,
    quiet_redistribution,
    root_mesh,
    torch_placement,
    working_out_shapes,
)
from shardviz.live.compat.modules import (
    class_name,
    compiled_calls_wrapped,
    computed_buffers,
    follow_modules_by,
    is_compiled,
    load_hooks,
    replaced,
    without_compiling,
)
from shardviz.live.compat.names import (
    clean_name,
    unit_of,
)
from shardviz.live.compat.parameters import parameters_are_held
from shardviz.live.compat.pipelines import asks_for_shapes, pipelines_alone, stages_of
from shardviz.live.compat.tensors import (
    has_storage,
    id_without_memory,
    in_backward,
    inner_tensors,
    plain_tensors,
    real_tensors,
    storages_resized,
    version_of,
)
from shardviz.live.compat.worlds import (
    count_groups,
    default_store,
    fake_world,
    groups_here,
    have_come,
    ranks_of_operator,
    split_alike,
    world_of,
)

__all__ = [
    "UnwrappedMode",
    "answered_alone",
    "asks_for_shapes",
    "class_name",
    "clean_name",
    "compiled_calls_wrapped",
    "computed_buffers",
    "count_groups",
    "ddp_alone",
    "ddp_buckets",
    "default_store",
    "dividing_float64_once",
    "fake_mode",
    "fake_world",
    "fakes_converted",
    "flat_gradients_reduced",
    "flat_params",
    "flat_params_without_memory",
    "flatten_mesh",
    "follow_modules_by",
    "fsdp_units",
    "futures_answered",
    "groups_here",
    "has_ddp",
    "has_known_value",
    "has_storage",
    "have_come",
    "held_back",
    "id_without_memory",
    "in_backward",
    "inner_tensors",
    "is_compiled",
    "is_fake",
    "is_made_in_first_step",
    "know_fakes",
    "load_hooks",
    "local_of",
    "looks_for_unused",
    "new_fakes",
    "only_in_first_step",
    "parameters_are_held",
    "pipelines_alone",
    "placement_of",
    "plain_tensors",
    "quiet_redistribution",
    "ranks_of_operator",
    "real_tensors",
    "replaced",
    "root_mesh",
    "split_alike",
    "stages_of",
    "storages_resized",
    "torch_placement",
    "unit_of",
    "version_of",
    "wide_reductions",
    "without_compiling",
    "without_pinned_memory",
    "working_out_shapes",
    "world_of",
]
