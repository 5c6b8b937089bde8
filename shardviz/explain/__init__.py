"""The catalogue: every cause that a finding can have, with its name, its words and its fix.

A cause is a small class in the module of its family. Its docstring is its page (`shardviz explain CAUSE`), its fields
are what it must know of the case, and an instance of it is the explanation of a finding. Nothing here judges: rules in
`check/`, `checkpoint/` and `testing/` decide that a cause applies and fill in its fields.
"""
