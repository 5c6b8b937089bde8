"""Checkpoints on disk, read offline with numpy: DCP, safetensors and Hugging Face.

`formats/` reads what torch and others wrote without running any of it, `open` finds out which format it is, `records`
says what a checkpoint is, and where in its files a part of a tensor is; `findings` and `optimizer` check it,
`comparing/` lays two of them side by side, `live_job/` a job and one; `maps/` says how the tensors of one are made of
the other's.
"""
