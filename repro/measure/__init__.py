"""Measurements: records and run folders in, results files out."""
