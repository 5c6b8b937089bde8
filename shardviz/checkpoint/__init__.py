"""Checkpoints on disk, read offline with numpy alone: DCP folders, safetensors files and Hugging Face folders.

`pickled` and `archive` read what torch wrote without running any of it, `dcp` and `headers` a format each, `open` finds
out which it is, `records` says what a checkpoint is; `findings` and `optimizer` check it, `compare` lays two of them
side by side; `maps` says how the tensors of one are made of the other's.
"""
