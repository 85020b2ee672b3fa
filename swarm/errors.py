"""What a command prints when the user, a file or the network is at fault."""

from __future__ import annotations


class UserError(Exception):
    """One line for the terminal: the cause, then what to try next. The command line exits with 2."""
