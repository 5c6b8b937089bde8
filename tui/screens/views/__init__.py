"""The views, one module each; `view` is what they share, and `all` names them in the order of their keys."""
