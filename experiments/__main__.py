"""Names the commands: `python -m experiments`."""

COMMANDS = {
    "run": "trains one task with one algorithm",
    "compare": "compares algorithms, and writes a report",
    "aim": "compiles a run for hardware that need not be present",
}

if __name__ == "__main__":
    rows = [f"python -m experiments.{x:<8} {text}" for x, text in COMMANDS.items()]
    print("The harness of syncalgos, in a clone of its repository:", *rows, sep="\n")
