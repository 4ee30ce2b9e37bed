"""Figures: a model or records in, a matplotlib Figure out.

Each figure of ``progresvit analyze`` is a file with three functions, which measure, make the table and draw. The file
``registry.py`` lists them; ``sample.py``, ``hooks.py``, ``interventions.py`` and ``block_points.py`` are what they
share.
"""
