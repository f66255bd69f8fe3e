"""Memory that is kept back from a Python program, so that its end can be told when it has used up the rest.

It is what lies between the soft limits and the hard ones. While the program's own code runs it is kept, for all else it
may be used. A program that raises its soft limits itself gains these few megabytes, and then its end goes untold.

Only the standard library is imported.
"""

from __future__ import annotations

from resource import RLIMIT_AS, RLIMIT_DATA, getrlimit, setrlimit

SIZE = 8 << 20
"""Bytes. A traceback needs some thousands, IPython some millions."""

# Made beforehand, and used without a loop: there may be no memory for a tuple, or an iterator, when they are needed.
_data = _data_in_all = getrlimit(RLIMIT_DATA)
_space = _space_in_all = getrlimit(RLIMIT_AS)


def prepare() -> None:
    """Take the limits of this process for those of its program."""
    global _data, _data_in_all, _space, _space_in_all
    _data, _space = getrlimit(RLIMIT_DATA), getrlimit(RLIMIT_AS)
    _data_in_all, _space_in_all = (_data[1], _data[1]), (_space[1], _space[1])


def keep() -> None:
    """The program's own code comes next."""
    setrlimit(RLIMIT_DATA, _data)
    setrlimit(RLIMIT_AS, _space)


def use() -> None:
    """The program's own code is over, for now or for good."""
    setrlimit(RLIMIT_DATA, _data_in_all)
    setrlimit(RLIMIT_AS, _space_in_all)
