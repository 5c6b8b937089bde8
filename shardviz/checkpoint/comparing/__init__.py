"""Two checkpoints side by side: which tensors are compared, and what became of each."""
