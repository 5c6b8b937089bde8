"""The recipes: one probe a file."""
