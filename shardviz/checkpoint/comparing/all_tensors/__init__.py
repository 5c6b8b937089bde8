"""What became of tensors, told from all of them: each module takes every outcome and returns them with its own."""
