"""Serving: the engine behind an HTTP server, and on a Ray cluster."""
