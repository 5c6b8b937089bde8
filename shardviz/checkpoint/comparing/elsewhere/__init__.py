"""Values that a checkpoint has under another name, in several tensors or one, or from another step."""
