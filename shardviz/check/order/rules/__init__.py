"""The rules for one tensor: each looks at a case or at tensors of one kind."""
