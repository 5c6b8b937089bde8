"""A whole run as one HTML page that opens from disk."""
