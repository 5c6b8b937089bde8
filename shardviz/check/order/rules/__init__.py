"""The rules for one tensor: each looks at a case, or at the tensors of one kind, and says what is wrong and why."""
