"""`python -m bertsmith`, and the `bertsmith` command."""

import faulthandler
import sys


def main() -> None:
    """Run the command line and leave with its exit code."""
    if sys.stderr is not None:  # a crash in a library (SIGSEGV, SIGBUS) names the line of ours
        faulthandler.enable()
    from bertsmith.cli import run  # noqa: PLC0415 - keeps this module free of side effects

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
