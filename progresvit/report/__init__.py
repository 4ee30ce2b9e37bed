"""From a results folder to a page of tables and figures."""
