"""The two kinds of error that a user meets, and the exit codes they carry.

Both derive from ``ValueError``: whoever calls the Python API can catch one builtin type. Broken internal
invariants are ``AssertionError`` and are never caught.
"""

from __future__ import annotations


class OctavoError(ValueError):
    """Something could not be carried out: what was wrong, what is allowed, what to do. Exit code 1."""

    exit_code = 1


class UsageError(OctavoError):
    """The request itself is wrong: an argument, an option, a path that the caller can correct. Exit code 2."""

    exit_code = 2
