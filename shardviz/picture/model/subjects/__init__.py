"""Subjects of a page: a tensor of a dump, of a checkpoint, or of both side by side."""
