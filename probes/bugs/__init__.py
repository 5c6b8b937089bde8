"""Known silent bugs, recreated, one per file."""
