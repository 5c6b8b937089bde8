"""Hypothesis draws new examples in every run, and a slow machine is no failure."""

from importlib.metadata import version

from hypothesis import settings

# torch 2.4 has no _StridedShard: there is nothing to compare with.
if version("torch").startswith("2.4."):
    collect_ignore = ["test_layout_against_torch.py", "test_layout_on_ranks.py"]

settings.register_profile("shardviz", deadline=None, print_blob=True)
settings.load_profile("shardviz")
