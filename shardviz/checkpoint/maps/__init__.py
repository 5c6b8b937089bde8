"""Maps: small tables that say how a checkpoint's or model's tensors are made from others.

`language` reads a table, `functions` does what is done to elements, `mapped_tensors` has tensors made of others, read
no more than it has to be, and what of it is padding; `matching` finds which tensors a rule is about, `families` are the
tables that come with shardviz, and the numbers of a model's own settings; `wrong` names what a conversion did instead,
by the slips that make it and by the `numbering` in names.
"""
