"""The one exception a user may see: a mistake of theirs, said in a line."""


class UserError(Exception):
    """Something only the user can put right: a path, a value, a row, a file.

    The message is one line that says what is wrong, where (``file:line``, key or column) and
    what to do. The command line prints it without a traceback and exits with code 2. A mistake
    of ours is any other exception, and keeps its traceback.
    """
