"""What looks like a bug and is none: nothing may be found here."""
