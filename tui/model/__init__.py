"""What the screens show, as plain data: nothing here knows a widget."""
