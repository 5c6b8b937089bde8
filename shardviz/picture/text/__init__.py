"""Pictures, tables and reports as text, for a terminal, a pipe or a file."""
