"""Figures: a model or records in, a matplotlib Figure out."""
