"""The one exception for what a user can put right."""


class UserError(ValueError):
    """Bad input: the message names the value, the rule and the remedy. The command line exits with 2 on it."""
