"""How many files and sockets this process may have open."""

import resource

from hashtap.errors import UsageError

__all__ = ["allow_connections"]

OTHER_FILES = 64  # shards, logs and what the interpreter has open


def allow_connections(connections: int) -> None:
    """Raise the limit of open files so that many connections fit beside the other files; it is never lowered.

    Raises:
        UsageError: when the system's hard limit is lower.
    """
    wanted = connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise UsageError(
            f"--concurrency {connections} needs {wanted:,} open files, and this process may have {hard:,}: "
            f"give at most --concurrency {hard - OTHER_FILES}, or raise the limit (ulimit -Hn)"
        )
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
