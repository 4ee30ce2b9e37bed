"""A model as one graph per round: writing, quantising and describing an export."""
