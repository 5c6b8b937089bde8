"""The Textual app: the only room that imports textual."""
