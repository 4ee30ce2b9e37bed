"""Serving: the engine behind an HTTP server, and on a Ray cluster.

A request goes from front/app.py (addresses), with a body read within limits (front/body.py) and checked
(protocol.py), to service.py, which submits its images to the engine. start.py puts a server together.
"""
