"""Every round of a batch, as columns: for the validation of a training, for records, and for a running engine."""
