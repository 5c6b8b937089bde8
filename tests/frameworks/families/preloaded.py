"""Imported once, by the process that ranks are forked from: transformers, the models, and what they need."""

import contextlib
import os

import safetensors.torch  # noqa: F401
import transformers.core_model_loading
import transformers.distributed
import transformers.generation  # noqa: F401

import shardviz.live.api
import shardviz.live.capture.lookup.by_reference
import shardviz.live.dumping  # noqa: F401
from tests.frameworks.families import trip  # noqa: F401
from tests.frameworks.families.configs import model_of, with_plan

NAMES = "SHARDVIZ_FAMILIES"
"""The environment variable that names the configurations whose models are imported, separated by commas; empty: all."""

with contextlib.suppress(ImportError):  # what saving imports where it is installed
    import accelerate.utils.other  # noqa: F401
    import deepspeed  # noqa: F401

for _name in filter(None, os.environ.get(NAMES, "").split(",") if os.environ.get(NAMES) else with_plan()):
    with contextlib.suppress(ImportError):
        model_of(with_plan()[_name])
