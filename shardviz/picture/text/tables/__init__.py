"""Tables in text: columns aligned by the width that characters take on the screen."""
