"""Training tasks: one class per method, and what a method adds to the training loop."""
