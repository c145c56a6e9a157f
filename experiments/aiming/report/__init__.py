"""The tables, the JSON file and the page that report the results."""
