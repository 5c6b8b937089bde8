"""Find and name silent sharding bugs in PyTorch models."""
