"""Stamped values: fills that say in any element type where each value belongs, and checkpoints that are full of them.

`fill` makes the values, without torch; `checkpoint` finds out what a checkpoint or a model has, and writes its copy;
`safetensors_copy` and `dcp_copy` do so in their formats. `live/capture/` reads them back.
"""
