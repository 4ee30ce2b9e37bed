"""Studies: many runs, one folder of results, each number with the command that makes it again."""
