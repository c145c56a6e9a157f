"""The figures of a report, a file a kind."""
