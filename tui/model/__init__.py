"""The content of the screens as plain data: nothing here knows a widget."""
