"""Stamped values that show where each belongs, in any dtype, and checkpoints full of them.

`fill` makes the values, `copies` writes checkpoints of them. Neither needs torch: `live/outline.py` finds out what a
model has that is not built yet, and `live/capture/` reads copies back.
"""
