"""The web page: its routes, and the files that a browser loads."""
