"""Serving: the engine behind an HTTP server."""
