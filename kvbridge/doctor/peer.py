"""The check of another agent: may we dial it, does it answer, does it accept our engine, and do its bytes arrive."""

from __future__ import annotations

import asyncio
import atexit
import secrets
import socket
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import assert_never

import uvloop
from kvbridge_proto.common import AgentCard
from kvbridge_proto.peer import FabricCard, Goodbye, Refuse, Route, Welcome
from kvbridge_proto.pool import Pool
from msgspec import structs

from ..agent.daemon import trust_of
from ..agent.outgoing_peers import route_of, verdict_of
from ..dataplane.resources import Resources, chosen_gpu, open_resources, staging_size
from ..device.copier import CpuBlockCopier
from ..errors import KVBridgeError, OperatorError
from ..exchange.route import READ_ROUTE_NAMES, SLOT_ROUTE_NAMES, Site
from ..exchange.session import AttachedEngine, Session, accept, hello
from ..local_agents import ask_pool
from ..loopback.pools import Shape, describe
from ..oneline import plain
from ..options import AgentConfig
from ..routes.choice import is_proved
from ..routes.rate import is_slow, is_too_small
from ..transport.control import Control
from ..transport.link import Arrived, Link, Lost, Reached, Rejected, Retried, Settings
from .entries import of_code
from .finding import CheckOutcome, Finding, Subject, failed, not_here, ok, warning
from .routes import nixl, why_not_here

PEER_ANSWER_S = 10.0
PEER_TRY_S = 2.0
PROBED_SLOT_BYTES = 64 << 20  # at most; a probe is a 64th of it
RECEIVE_SLOTS, SEND_SLOTS = 2, 1
LANE = 0  # where the other agent writes its proof
NO_ENGINE = Shape(name="doctor", axes="LPBHTE", block_tokens=16, blocks=1, layers=1, kv_heads=1)
REMEDIES = {
    "peer_not_allowed": "name the address in `dial`, and its key in `peers`",
    "peer_unreachable": "see that the agent runs and listens there, and that no firewall stands between",
    "key_refused": "put our public key on its list (`peers` there), or use one pair for the whole fleet",
    "peer_silent": "it took the connection and does not speak: look at its process, it may be stopped",
    "no_engine": "wait until its engine has attached",
    "no_route": "see `routes` and `net_devices` on both sides, firewalls, and the checks of routes on both hosts",
}
UNSEEN = (
    "pull, which reads an engine's memory, was not looked at: `kvbridge status` shows whether it is taken once a "
    "request has come"
)
ALONE = "pull is the only one that `routes` allows"
NOT_ASKED = (
    "no byte was moved; --prove-route moves some, for which the other agent may have to allocate its staging memory, "
    "(receive_slots + send_slots + 2) * slot_bytes, which it keeps until it ends"
)


@dataclass(frozen=True, slots=True)
class ProbeSlots:
    """Slots that the other agent may write to, or None and why not. `remedy` is "" if none are needed."""

    resources: Resources | None
    lacks: str = ""
    remedy: str = ""


def peer(subject: Subject) -> Finding:
    """Dial --peer as the agent would, and say hello with the pool of our engine.

    With --prove-route it is told of slots of ours, and proves its route to them.
    """
    if not subject.peer:
        return not_here("no --peer was named")
    incarnation = secrets.token_bytes(8).hex()
    try:
        pool, ours = ask_pool(subject.config.socket).pool, True
    except OperatorError:
        pool, ours = describe(NO_ENGINE, 0), False
    try:
        slots = _slots(subject, incarnation) if ours else ProbeSlots(None)
        engine = _engine(subject.config, incarnation, pool, slots.resources)
        link, answer = uvloop.run(_handshake(subject, engine))
    except KVBridgeError as error:
        if error.code == "peer_unreachable" and _is_taken(subject.peer):
            remedy = f"{REMEDIES['peer_silent']}; or it has another key than the address says"
            return failed(f"{error.code}: {error}; its port takes connections", remedy)
        return failed(f"{error.code}: {error}", REMEDIES.get(error.code) or of_code(error.code))
    text = f"{subject.peer} answers, {f'its key is {link.key}' if link.key else 'without keys'}"
    if isinstance(answer, Refuse):
        return _refused(answer, text, slots, subject.config, ours)
    if not ours:
        return _alone(text)
    session = accept(answer, engine, link.key)
    if isinstance(session, Refuse):
        return failed(plain(f"{text}: {session.code}: {'; '.join(session.reasons)}"), of_code(session.code))
    assert slots.resources is not None, "accept refuses a route without slots"
    return _judged(session, slots.resources, subject.config, text)


def _slots(subject: Subject, incarnation: str) -> ProbeSlots:
    """A few slots, as our agent would have them. Raises OperatorError for options that no agent starts with.

    They stay until this process exits: a peer that has not answered in time may still write to them.
    """
    config = subject.config
    routes = _written(config)
    if not routes:
        return ProbeSlots(None, f"no route was tried: {ALONE}, and it reads an engine's memory")
    if not subject.prove_route:
        return ProbeSlots(None, NOT_ASKED)
    devices = trust_of(config).data_devices(config.listen, config.advertise, config.net_devices)
    size = staging_size(config, is_gpu=chosen_gpu(config.device) is not None)
    config = structs.replace(
        config,
        routes=routes,
        net_devices=devices,
        slot_bytes=min(size.slot_bytes, PROBED_SLOT_BYTES),
        receive_slots=RECEIVE_SLOTS,
        send_slots=SEND_SLOTS,
    )
    started = nixl(replace(subject, config=config))  # in another process: UCX may abort
    if started.outcome is not CheckOutcome.OK:
        return ProbeSlots(None, f"no route was tried: {started.text}", started.remedy)
    try:
        resources = open_resources(config, incarnation)
    except KVBridgeError as error:
        return ProbeSlots(None, f"no route was tried: no slots: {error.code}: {error}", of_code(error.code))
    atexit.register(resources.close)
    return ProbeSlots(resources)


def _written(config: AgentConfig) -> tuple[Route, ...]:
    """The allowed routes by which a peer writes to slots."""
    return tuple(route for route in config.routes if route in SLOT_ROUTE_NAMES)


def _is_taken(address: str) -> bool:
    """Whether the port takes connections, even if the process behind it is stopped."""
    host, _, port = address.partition("#")[0].removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PEER_TRY_S):
            return True
    except OSError:
        return False


def _alone(text: str) -> Finding:
    return warning(
        f"{text}, and its engine is attached; no engine of ours to compare with, so no route was tried",
        "attach our engine and ask again, or name its agent with --socket",
    )


def _refused(answer: Refuse, seen: str, slots: ProbeSlots, config: AgentConfig, is_ours: bool) -> Finding:
    if not is_ours and answer.code in ("incompatible", "no_slots", "no_route"):
        return _alone(seen)
    fits = f"{seen}, and its engine's pool fits ours"  # it looks at pools first
    if answer.code == "no_route" and _read(config, is_gpu=False) and _is_of_reading(answer.reasons):
        return ok(f"{fits}; no route was tried: it allows pull alone; {UNSEEN}")
    if slots.resources is None and (answer.code == "no_slots" or (answer.code == "no_route" and not _written(config))):
        text = f"{fits}; {slots.lacks}"
        return warning(text, slots.remedy) if slots.remedy else ok(text)
    return failed(
        plain(f"{seen}, and refuses: {answer.code}: {'; '.join(answer.reasons)}"),
        REMEDIES.get(answer.code) or of_code(answer.code),
    )


def _read(config: AgentConfig, is_gpu: bool) -> list[Route]:
    """The routes by which memory is read, as far as they may work here."""
    read = [route for route in config.routes if route in READ_ROUTE_NAMES]
    return [route for route in read if not why_not_here(route, config, is_gpu)]


def _is_of_reading(reasons: tuple[str, ...]) -> bool:
    """Whether there is nothing against a route but that our Hello hides those by which memory is read."""
    return bool(reasons) and all(reason.partition(": ")[0] in READ_ROUTE_NAMES for reason in reasons)


def _judged(session: Session, resources: Resources, config: AgentConfig, seen: str) -> Finding:
    """What its proof says of the route."""
    routed, agent = session.routed, session.peer
    reasons = [
        each for each in routed.why.split("; ") if each.partition(": ")[0] not in READ_ROUTE_NAMES
    ]  # we hid them
    session = replace(session, routed=replace(routed, why="; ".join(reasons)))
    text = f"{seen}: {agent.name} (kvbridge {agent.version}), {verdict_of(session)}; {route_of(session)}"
    if routed.probe is None or not is_proved(resources, routed.route, LANE, routed.probe):
        return failed(plain(f"{text}, but its bytes are not here"), "report it: it says that it wrote them")
    if routed.rate is not None and is_too_small(routed.rate) and not is_slow(routed.rate):
        text += ", too small to judge its rate"
    text = plain(f"{text}, and its bytes are here; {_unseen(session, resources, config)}".removesuffix("; "))
    if routed.rate is not None and is_slow(routed.rate):
        return warning(text, "see that `net_devices` names the fast network, and the checks of routes on both hosts")
    return ok(text)


def _unseen(session: Session, resources: Resources, config: AgentConfig) -> str:
    """The routes that we may have here and that this says nothing of."""
    routed, is_gpu = session.routed, resources.site.fabric.memory == "vram"
    here = [route for route in config.routes if route != routed.route and not why_not_here(route, config, is_gpu)]
    untried = [route for route in here if route in SLOT_ROUTE_NAMES and f"{route}: " not in routed.why]
    others = f"{', '.join(untried)}: not tried, as {routed.route} works" if untried else ""
    return "; ".join(filter(None, (others, UNSEEN if _read(config, is_gpu) else "")))


async def _handshake(subject: Subject, engine: AttachedEngine) -> tuple[Link, Welcome | Refuse]:
    """The answer to our Hello. Raises PeerError or OperatorError, `peer_silent` if no answer comes in time."""
    config = subject.config
    settings = Settings(connect_s=config.connect_s, silence_s=PEER_ANSWER_S)
    async with Control(engine.agent.incarnation, settings=settings, trust=trust_of(config)) as control:
        link = control.dial(subject.peer)
        try:
            async with asyncio.timeout(config.connect_s + PEER_ANSWER_S):
                answer = await _heard(control, link, engine)
        except TimeoutError:
            raise OperatorError("peer_silent", f"no answer from {subject.peer}") from None
        finally:
            link.send(Goodbye(reason="doctor has seen enough"))
            link.close()
        return link, answer


async def _heard(control: Control, link: Link, engine: AttachedEngine) -> Welcome | Refuse:
    async for event in control.events():
        match event:
            case Reached():
                link.send(hello(engine, LANE, link.address, serial=1, oldest=1, can_pull=False))
            case Lost(code=code, reason=reason):
                raise OperatorError(code, reason)
            case Arrived(envelope=envelope) if isinstance(envelope.body, Welcome | Refuse):
                return envelope.body
            case Arrived() | Rejected() | Retried():
                pass
            case _:
                assert_never(event)
    raise OperatorError("peer_silent", "the link ended")


def _engine(config: AgentConfig, incarnation: str, pool: Pool, resources: Resources | None) -> AttachedEngine:
    """What our Hello says. Without slots nothing can be written to us, whatever the peer answers."""
    address = config.advertise or config.listen
    agent = AgentCard(name="doctor", incarnation=incarnation, address=address, version=version("kvbridge"))
    bare = FabricCard(kind="nixl", name=incarnation, descriptor=b"", base=0, slot_bytes=PROBED_SLOT_BYTES, slots=0)
    site = Site(bare, routes=_written(config) or ("nixl",)) if resources is None else resources.site
    return AttachedEngine(agent=agent, epoch=1, pool=pool, site=site, digests=CpuBlockCopier.digests)
