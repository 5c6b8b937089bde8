"""The screens: `main` shows a view at a time, the others are dialogs over it."""
