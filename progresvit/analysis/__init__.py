"""Figures: records in, a matplotlib Figure out."""
