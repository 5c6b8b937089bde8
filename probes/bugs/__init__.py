"""Known silent bugs, recreated: one file each."""
