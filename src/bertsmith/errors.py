"""How a run may end short: a mistake of the user's, said in a line, or an interruption."""

EXIT_FAULT, EXIT_USER_ERROR = 1, 2
"""Exit codes: a fault of ours, with a traceback; a mistake of the user's, in a line."""

EXIT_INTERRUPTED = 75
"""Exit code of a run that can go on with --resume: a signal stopped it, or a full disk did.
sysexits.h calls it EX_TEMPFAIL, "try again later"."""


NOTHING_YET = "interrupted before there was anything to save; start it again"
"""Said where a signal came too early."""


class UserError(Exception):
    """Something only the user can put right: a path, a value, a row, a file.

    The message is one line that says what is wrong, where (``file:line``, key or column) and
    what to do. The command line prints it without a traceback and exits with code 2. A mistake
    of ours is any other exception, and keeps its traceback.
    """
