"""The command line: flags, errors, signals and the terminal."""
