"""The answer of a report in words: headline, claims, laws and warnings."""
