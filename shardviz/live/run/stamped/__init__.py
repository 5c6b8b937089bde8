"""`shardviz run --stamp`: a job loads stamped copies, and ends before it can save: the one mode that destroys values.

`table` says which functions of torch and libraries are changed, `loads` what each rank loaded, `copies` writes copies
of checkpoints on disk, `filling` stamps what torch.load returned, `poison` marks what a load has yet to write.
"""
