"""Inference of the held layout from ids, or of the disorder that explains them.

`chain` derives how one dim is split, `layout` puts the dims together and proves the result; the other modules know the
patterns that real bugs leave and that are not layouts.
"""

from shardviz.check.order.infer.layout import infer_layout

__all__ = ["infer_layout"]
