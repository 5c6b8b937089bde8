"""Relations of a rank's array to the expected one: ids and values by one code, in numpy.

A `Pair` has one tensor, wanted and held. `search.relation_of(pair)` says what each rank holds, as a short chain of
`Relation`s: which region, in which order, times which number, rounded to which dtype, with what added. Ids are values
that are unique and compared with the bound 0. Judges that have no pair use the parts: `factors`, `orders`, `casts`,
`values`. Every judge takes its thresholds from `tolerance`.

Nothing is imported here: ranks that need a threshold import that module alone.
"""
