"""From what each rank holds to where it stands: the held layout in the notation, or the name of what happened to it.

`chain` derives how one dim is split, `layout` puts the dims together and proves the result; the other modules know the
patterns that real bugs leave and that are not layouts.
"""

from shardviz.check.order.infer.layout import infer_layout

__all__ = ["infer_layout"]
