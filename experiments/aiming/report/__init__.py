"""The table, the file and the page of what was found."""
