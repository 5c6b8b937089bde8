"""Trees: the tensors, the memory of modules, the calls of a step."""
