"""The views, of which the app shows one at a time, and the dialogs over them."""
