"""The one exception for mistakes a user can mend; every command turns it into exit code 2."""


class UserError(ValueError):
    """Bad input. The message says what is wrong, where (file, key, value), and what to do about it."""


class SharedError(UserError):
    """An error that all processes of a run raise at the same point, so that they can still act together."""
