"""How many file descriptors this process, an agent or a proxy, may have; and how many links of an agent that allows."""

from __future__ import annotations

import logging
import os
import resource

log = logging.getLogger("kvbridge.agent")

ENOUGH = 1 << 16  # more than all links take; with a limit of millions, programs that loop over all descriptors are slow
RESERVED = 256  # for an agent without peers: its engine, others at its doors, and some to spare
# A dialled link takes 4 and a pidfd, an accepted one 1, a peer of the fabric about 3. There may be `links` of each.
OF_A_LINK = 16
FEW_LINKS = 64  # links; fewer are logged
SPARE_DESCRIPTORS = 64  # descriptors that links leave to others


def raised() -> int:
    """Raise the limit as far as is allowed and useful, and return it. The default, 1024, is for `select`'s sake."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def links(limit: int, most: int) -> int:
    """How many dialled links, and as many accepted ones, such a limit allows; `most` at most."""
    enough = max(1, (limit - RESERVED) // OF_A_LINK)
    if enough < min(most, FEW_LINKS):
        log.warning("RLIMIT_NOFILE: %d descriptors are enough for %d peers each way; raise it", limit, enough)
    return min(most, enough)


def are_short() -> bool:
    """Whether no more than SPARE_DESCRIPTORS are left. A new one has the lowest free number: all below it are taken.

    ZeroMQ frees those of a closed socket on a thread of its own, which may lag behind.
    """
    try:
        lowest = os.eventfd(0, os.EFD_CLOEXEC)
    except OSError:
        return True
    os.close(lowest)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and lowest >= soft - SPARE_DESCRIPTORS
