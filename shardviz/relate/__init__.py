"""What a rank's array is of the wanted one: exact ids and values by the same code, with numpy alone.

A `Pair` has one tensor, wanted and held. `relation_of(pair)` says what each rank holds, as a short chain of
`Relation`s: which region, in which order, times which number, rounded to which dtype, with what added. Ids are values
that are unique and compared with the bound 0. Judges that have no pair use the parts: `factors`, `orders`, `sums`,
`casts`, `values`. Every judge takes its thresholds from `tolerance`.
"""

from shardviz.relate.pair import Group, Pair, Related
from shardviz.relate.relations import Chain, Relation
from shardviz.relate.replay import replay
from shardviz.relate.search import relation_of
from shardviz.relate.tolerance import Bound

__all__ = ["Bound", "Chain", "Group", "Pair", "Related", "Relation", "relation_of", "replay"]
