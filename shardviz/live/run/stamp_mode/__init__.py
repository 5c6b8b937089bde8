"""`shardviz run --stamp`: a job loads stamped copies, and ends before it can save.

It is the one mode that destroys values.

`table` says which functions of torch and libraries are changed, `loads` what each rank loaded in place of what.
"""
