"""Maps: small tables that say how the tensors of one checkpoint, or of a model, are made of those of another.

`language` reads a table, `functions` names what can be done to elements and `views` does it, `padding` is what a
table says is not compared, `made` is a tensor made of others and reads no more than it has to, `matching` finds which
tensors a rule is about, `settings` the numbers that a model's own settings have; `wrong` names what a conversion did
instead, by the slips that make it and by the `numbering` in names, `families` are the tables that come with
shardviz.
"""
