"""Files: atomic writes, resumable outputs, model folders, YAML, and values parsed from them."""
