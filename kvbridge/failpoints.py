"""Named places in the life of a block where a test can make this process die, stop, pause or fail.

`KVBRIDGE_FAILPOINTS="sender.gathered=kill@3,receiver.done_told=pause:0.5"`: kill this process at the third gather, and
pause it for half a second after the first Done. Each fires once, the n-th time its place is passed (the first without
`@n`). While nothing is armed a place costs one look at a global. It is our only global, because it must be reachable
from everywhere and cost nothing. Imports nothing that an engine may lack.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Literal

from .errors import EngineError, FabricError, KVBridgeError, OperatorError

VARIABLE = "KVBRIDGE_FAILPOINTS"
Process = Literal["sender agent", "receiver agent", "either agent", "sender engine", "receiver engine", "either engine"]
Way = Literal["any", "slots", "pull"]
Action = Literal["kill", "stop", "pause", "fail"]
ACTIONS: tuple[Action, ...] = ("kill", "stop", "pause", "fail")
LONGEST_S = 600.0


@dataclass(frozen=True, slots=True)
class Place:
    """Which process passes it, and what is true there. `error` is what `fail` raises; with None `fail` is refused.

    `way` says on which routes it is passed: those with slots, `pull`, or any.
    """

    process: Process
    meaning: str
    error: type[KVBridgeError] | None = None
    way: Way = "any"


PLACES: dict[str, Place] = {
    # The engine, in adapters/engine/client.py:
    "engine.attach_sent": Place("either engine", "Attach is queued with its descriptors; no answer yet"),
    "engine.offer_sent": Place("sender engine", "an Offer is queued; the agent may gather from now on"),
    "engine.withdraw_sent": Place("sender engine", "an offer is taken back; its blocks may be read until Released"),
    "engine.want_sent": Place("receiver engine", "a Want is queued; the agent may scatter from now on"),
    "engine.abandon_sent": Place("receiver engine", "a want is given up; blocks stay the agent's until Failed"),
    "engine.done_heard": Place("receiver engine", "Done has come; the request does not know yet"),
    "engine.released_heard": Place("sender engine", "Released has come; the blocks are not reused yet"),
    "engine.detach_sent": Place("either engine", "Detach is queued; the agent still maps the memory"),
    # Attaching, and its end:
    "agent.attaching": Place("either agent", "an engine's memory is mapped, nobody knows of it yet", EngineError),
    "agent.attached": Place("either agent", "Attached is said, the epoch has begun"),
    "agent.leaving": Place("either agent", "the engine's requests are ended, its memory is still mapped"),
    # Sessions:
    "sender.hello_received": Place("sender agent", "a Hello has come; nothing is proved"),
    "sender.probed": Place(
        "sender agent", "the pattern is in the receiver's lane, the receiver does not know", way="slots"
    ),
    "sender.welcome_sent": Place("sender agent", "the session is open here, not yet at the receiver"),
    "receiver.welcome_received": Place("receiver agent", "the sender has agreed, we have not looked for its pattern"),
    "sender.memory_handed": Place(
        "sender agent", "a receiver has handles to our engine's memory: it may read", way="pull"
    ),
    "receiver.memory_opened": Place(
        "receiver agent", "the sender's engine's memory is mapped, no session is open", way="pull"
    ),
    # Asking:
    "receiver.want_heard": Place("receiver agent", "our engine wants; nothing is claimed"),
    "sender.offer_heard": Place("sender agent", "our engine offers; nothing is gathered"),
    "receiver.claim_sent": Place("receiver agent", "a Claim has left, perhaps with leases: slots may be written"),
    "sender.claim_received": Place("sender agent", "a Claim is heard; nothing is gathered for it"),
    "receiver.grant_sent": Place("receiver agent", "more slots are lent", way="slots"),
    # Moving:
    "sender.gather_begun": Place("sender agent", "the engine's blocks are about to be read", FabricError, way="slots"),
    "sender.gathered": Place("sender agent", "a chunk is in our slot, the loop has not heard of it", way="slots"),
    "sender.write_begun": Place("sender agent", "nothing of a gathered chunk has left", FabricError, way="slots"),
    "sender.write_posted": Place("sender agent", "a write is under way: it may land at any time", way="slots"),
    "sender.write_ended": Place("sender agent", "a write has ended, the loop has not heard of it", way="slots"),
    "receiver.notice_landed": Place(
        "receiver agent", "a chunk has landed and counts; its slot is ours again", way="slots"
    ),
    "receiver.scatter_begun": Place(
        "receiver agent", "the engine's blocks are about to be written", EngineError, way="slots"
    ),
    "receiver.scattered": Place(
        "receiver agent", "rows are in the engine's blocks, and it has not been told", way="slots"
    ),
    # Pulling:
    "sender.tables_sent": Place("sender agent", "a lease is promised: blocks may be read until it ends", way="pull"),
    "receiver.tables_heard": Place(
        "receiver agent", "the sender's blocks are told, nothing of them is read", way="pull"
    ),
    "receiver.read_begun": Place(
        "receiver agent", "the sender's blocks are about to be read into ours", FabricError, "pull"
    ),
    "receiver.read_ended": Place(
        "receiver agent", "rows are in our blocks; whether they count is not looked at", way="pull"
    ),
    "receiver.renewal_sent": Place("receiver agent", "the lease is asked for again, while we read", way="pull"),
    "sender.renewal_heard": Place("sender agent", "a renewal is heard, our engine may have said something", way="pull"),
    "sender.withdraw_heard": Place("sender agent", "an offer is taken back that a receiver may still read", way="pull"),
    # Ending:
    "receiver.done_told": Place("receiver agent", "Done is said to our engine, Settled not yet to the sender"),
    "receiver.settled_sent": Place("receiver agent", "Settled has left"),
    "sender.settled_heard": Place("sender agent", "the receiver has all rows"),
    "receiver.cancel_sent": Place("receiver agent", "a Cancel has left; what was lent may still be written"),
    "sender.cancel_received": Place("sender agent", "a Cancel is heard; writes may be under way"),
    "sender.drained_sent": Place("sender agent", "Drained has left: nothing of that transfer is written any more"),
    "receiver.drained_heard": Place("receiver agent", "Drained is heard, the slots are not free yet"),
    "sender.released_told": Place("sender agent", "Released is said: the engine reuses its blocks"),
}


@dataclass(slots=True)
class _Armed:
    """What happens, after `left` more passes."""

    action: Action
    seconds: float
    left: int


_armed: dict[str, _Armed] | None = None  # the global
_counting = threading.Lock()


def failpoint(name: str) -> None:
    """Pass this place. Raises its error of PLACES if it is armed to fail."""
    if _armed is not None:
        _pass(name, _armed)


def arm(text: str) -> tuple[str, ...]:
    """Arm these failpoints and no others. Returns them as text. Raises OperatorError for an unknown name or action."""
    global _armed
    chosen = dict(_parsed(part.strip()) for part in text.split(",") if part.strip())
    _armed = chosen or None
    return tuple(f"{name}={armed.action}@{armed.left}" for name, armed in chosen.items())


def arm_from_environment() -> tuple[str, ...]:
    """Arm what the environment asks for. Returns it as text. Raises OperatorError."""
    return arm(os.environ.get(VARIABLE, ""))


def armed() -> tuple[str, ...]:
    """The names that have not fired yet."""
    return tuple(name for name, each in (_armed or {}).items() if each.left > 0)


def _parsed(text: str) -> tuple[str, _Armed]:
    name, _, rest = text.partition("=")
    what, _, nth = rest.partition("@")
    action, _, seconds = what.partition(":")
    place = PLACES.get(name)
    if place is None:
        raise OperatorError("bad_failpoint", f"{VARIABLE}: no failpoint {name!r} in {text!r}")
    if action not in ACTIONS:
        raise OperatorError("bad_failpoint", f"{VARIABLE}: action: got {action!r}, must be one of {', '.join(ACTIONS)}")
    if action == "fail" and place.error is None:
        raise OperatorError("bad_failpoint", f"{VARIABLE}: nothing can fail at {name}")
    if not (nth or "1").isdecimal() or int(nth or "1") < 1:
        raise OperatorError("bad_failpoint", f"{VARIABLE}: @n: got {nth!r} in {text!r}, must be 1 or more")
    try:
        pause_s = float(seconds or "0")
    except ValueError:
        pause_s = -1.0
    if not 0 <= pause_s <= LONGEST_S or bool(pause_s) != (action == "pause"):
        raise OperatorError("bad_failpoint", f"{VARIABLE}: seconds: got {seconds!r} in {text!r}; only pause has them")
    return name, _Armed(action, pause_s, int(nth or "1"))


def _pass(name: str, all_armed: dict[str, _Armed]) -> None:
    found = all_armed.get(name)
    if found is None:
        return
    with _counting:
        found.left -= 1
        if found.left != 0:
            return
    os.write(2, f"failpoint {name}: {found.action}\n".encode())  # first: a killed process says nothing
    if found.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif found.action == "stop":
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # else another thread takes it, later
    elif found.action == "pause":
        time.sleep(found.seconds)
    else:
        error = PLACES[name].error
        assert error is not None
        raise error("failpoint", f"failpoint {name}")
