"""How many file descriptors this process may have, and how many links to others that is enough for."""

from __future__ import annotations

import logging
import os
import resource

log = logging.getLogger("kvbridge.agent")

ENOUGH = 1 << 16  # more than all links take; a limit of millions makes programs slow that walk through all of them
RESERVED = 256  # what an agent without peers has, its engine and others at its doors, and some more
# One that is dialled has 4, one that is accepted 1; a peer of the data side some 3, and both may be full.
OF_A_LINK = 16
FEW = 64  # links: fewer are said
SPARE = 64  # that links leave to others


def raised() -> int:
    """The limit, once it is as high as we may have it: by itself it is 1024, for the sake of `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def links(limit: int, most: int) -> int:
    """How many links to others such a limit is enough for, `most` at most: dialled, and as many accepted."""
    enough = max(1, (limit - RESERVED) // OF_A_LINK)
    if enough < min(most, FEW):
        log.warning("RLIMIT_NOFILE: %d descriptors are enough for %d peers each way; raise it", limit, enough)
    return min(most, enough)


def are_short() -> bool:
    """Whether no more than SPARE are left. The lowest that is free tells: all below it are taken.

    ZeroMQ gives those of a closed socket back on a thread of its own, and that may be behind.
    """
    try:
        lowest = os.eventfd(0, os.EFD_CLOEXEC)
    except OSError:
        return True
    os.close(lowest)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and lowest >= soft - SPARE
