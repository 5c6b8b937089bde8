"""What several commands share: arguments, dumps to read, progress, where output goes."""
