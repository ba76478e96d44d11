"""Every error that hashtap raises on purpose.

::

    HashtapError                 base; its message names the value, the reason and the remedy
    ├── UsageError               a flag, argument or sample file that cannot be used        exit 2
    ├── SetupError               the server cannot capture as asked: it must not serve      exit 3 (server)
    ├── FormatError              a file that is not a whole, valid shard                    exit 1
    ├── MismatchError            valid data that does not belong together (model, epoch …)  exit 2
    └── ServerLost               the server stopped answering                               exit 3
"""

__all__ = ["FormatError", "HashtapError", "MismatchError", "ServerLost", "SetupError", "UsageError"]


class HashtapError(Exception):
    """Base of all errors below. ``exit_code`` is what the command line returns for it."""

    exit_code = 1


class UsageError(HashtapError):
    """A flag, an argument or an input file cannot be used as given."""

    exit_code = 2


class SetupError(HashtapError):
    """The server cannot capture as asked. It is raised at start and ends the server."""

    exit_code = 3


class FormatError(HashtapError):
    """A file is not a whole, valid shard (or not hashtap's at all)."""


class MismatchError(HashtapError):
    """Two things that must agree do not: model, epoch, boundaries, directory, key."""

    exit_code = 2


class ServerLost(HashtapError):
    """The server stopped answering; what was captured is kept."""

    exit_code = 3
