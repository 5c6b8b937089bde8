"""Public bugs of 2025 and 2026, as cases of our own; what each must be called was written before its first run."""
