"""The check of the way to another agent: may it be dialled, is it there, who is it, what does it say to our engine."""

from __future__ import annotations

import asyncio
import secrets
import socket
from importlib.metadata import version
from typing import assert_never

from kvbridge_proto.common import AgentCard
from kvbridge_proto.peer import FabricCard, Refuse, Welcome
from kvbridge_proto.pool import Pool

from ..agent.daemon import trust_of
from ..device.copier_cpu import CpuBlockCopier
from ..errors import KVBridgeError, OperatorError
from ..exchange.route import Site
from ..exchange.session import AttachedEngine, hello
from ..geometry.compat import Convertible, Incompatible, verdict
from ..local_agents import ask_pool
from ..loopback.pools import Shape, describe
from ..oneline import plain
from ..transport.control import Control
from ..transport.events import Arrived, Lost, Reached, Rejected, Settings
from ..transport.link import Link
from .finding import Finding, Subject, failed, not_here, ok, warning

ANSWER_S = 10.0
TRY_S = 2.0
SLOT_BYTES = 4 << 20
NO_ENGINE = Shape(name="doctor", axes="LPBHTE", block_tokens=16, blocks=1, layers=1, kv_heads=1)
REMEDIES = {
    "peer_not_allowed": "name the address in `dial`, and its key in `peers`",
    "peer_unreachable": "see that the agent runs and listens there, and that no firewall stands between",
    "key_refused": "put our public key on its list (`peers` there), or use one pair for the whole fleet",
    "peer_silent": "it took the connection and does not speak: look at its process, it may be stopped",
    "no_engine": "wait until its engine has attached",
}


def peer(subject: Subject) -> Finding:
    """Dial --peer as the agent would, and greet it with the pool of our engine."""
    if not subject.peer:
        return not_here("no --peer was named")
    try:
        pool, ours = ask_pool(subject.config.socket).pool, True
    except OperatorError:
        pool, ours = describe(NO_ENGINE, 0), False
    try:
        link, answer = asyncio.run(_greeted(subject, pool))
    except KVBridgeError as error:
        if error.code == "peer_unreachable" and _is_taken(subject.peer):
            remedy = f"{REMEDIES['peer_silent']}; or it has another key than the address says"
            return failed(f"{error.code}: {error}; its port takes connections", remedy)
        return failed(f"{error.code}: {error}", REMEDIES.get(error.code, "see the entry of this code"))
    key = f"its key is {link.key}" if link.key else "without keys"
    return _judged(answer, pool, f"{subject.peer} answers, {key}", ours)


def _is_taken(address: str) -> bool:
    """Whether a kernel there takes connections for somebody, who may be stopped."""
    host, _, port = address.partition("#")[0].removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), TRY_S):
            return True
    except OSError:
        return False


def _judged(answer: Welcome | Refuse, pool: Pool, said: str, is_ours: bool) -> Finding:
    if not is_ours and (isinstance(answer, Welcome) or answer.code in ("incompatible", "no_slots", "no_route")):
        return warning(
            f"{said}, and its engine is attached; no engine of ours to compare with",
            "attach our engine and ask again, or name its agent with --socket",
        )
    match answer:
        case Refuse(code="no_slots" | "no_route"):  # said after the verdict, to one who names no slots
            return ok(f"{said}, and its engine's pool fits ours")
        case Refuse(code=code, reasons=reasons):
            return failed(
                plain(f"{said}, and refuses: {code}: {'; '.join(reasons)}"),
                REMEDIES.get(code, "see the entry of this code, and `kvbridge plan`"),
            )
        case Welcome():
            found = verdict(answer.pool, pool)
            if isinstance(found, Incompatible):
                return failed(plain(f"{said}: incompatible: {'; '.join(found.reasons)}"), "see `kvbridge plan`")
            changes = f"converting {'; '.join(found.changes)}" if isinstance(found, Convertible) else "same"
            return ok(plain(f"{said}: {answer.agent.name} (kvbridge {answer.agent.version}), {changes}"))


async def _greeted(subject: Subject, pool: Pool) -> tuple[Link, Welcome | Refuse]:
    """The answer to our Hello. Raises PeerError, OperatorError, or OperatorError `peer_silent` after ANSWER_S."""
    config, incarnation = subject.config, secrets.token_bytes(8).hex()
    settings = Settings(connect_s=config.connect_s, silence_s=ANSWER_S)
    async with Control(incarnation, settings=settings, trust=trust_of(config)) as control:
        link = control.dial(subject.peer)
        try:
            async with asyncio.timeout(config.connect_s + ANSWER_S):
                answer = await _heard(control, link, _engine(incarnation, config.advertise or config.listen, pool))
        except TimeoutError:
            raise OperatorError("peer_silent", f"no answer from {subject.peer}") from None
        link.close()
        return link, answer


async def _heard(control: Control, link: Link, engine: AttachedEngine) -> Welcome | Refuse:
    async for event in control.events():
        match event:
            case Reached():
                link.send(hello(engine, address=link.address, serial=1, oldest=1, can_pull=False))
            case Lost(code=code, reason=reason):
                raise OperatorError(code, reason)
            case Arrived(envelope=envelope) if isinstance(envelope.body, Welcome | Refuse):
                return envelope.body
            case Arrived() | Rejected():
                pass
            case _:
                assert_never(event)
    raise OperatorError("peer_silent", "the link ended")


def _engine(incarnation: str, address: str, pool: Pool) -> AttachedEngine:
    """An agent without slots: nothing can be written to it, whatever the other thinks of us."""
    card = FabricCard(kind="nixl", name=incarnation, descriptor=b"", base=0, slot_bytes=SLOT_BYTES, slots=0)
    agent = AgentCard(name="doctor", incarnation=incarnation, address=address, version=version("kvbridge"))
    return AttachedEngine(
        agent=agent, epoch=1, pool=pool, site=Site(card, routes=("nixl",)), digests=CpuBlockCopier.digests
    )
