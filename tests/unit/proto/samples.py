"""One sample of every message, from which the golden frames are made. Pure."""

from __future__ import annotations

from typing import Any

from kvbridge_proto import door, engine, peer, status
from kvbridge_proto.common import OURS, AgentCard, Blocks, Rank
from kvbridge_proto.pool import Codec, Engine, Group, Handle, Layer, Model, Plane, Pool, Region, Shard, Step

BF16 = Codec(name="bf16", width=64, element_bytes=2, row_bytes=128)
FP8 = Codec(name="fp8_e4m3", width=64, element_bytes=1, row_bytes=64, scales=(0.5, 0.25))


def _plane(layer: int, part: str, offset: int, token_axis: tuple[Step, ...], codec: Codec) -> Plane:
    return Plane(
        layer=layer,
        part=part,
        offset=offset,
        block_stride=16 * 4 * codec.row_bytes,
        token_axis=token_axis,
        head_stride=codec.row_bytes,
        element_axis=(Step(codec.width, codec.element_bytes),),
        first_head=2,
        heads=2,
        total_heads=4,
        codec=codec,
        name=f"model.layers.{layer}.attn",
    )


POOL = Pool(
    engine=Engine(kind="vllm", version="0.32.0", id="prefill-7f3a"),
    model=Model(
        name="tiny",
        layers=(
            Layer(kind="full", kv_heads=4, key_width=64, value_width=64),
            Layer(kind="sliding", kv_heads=4, key_width=64, value_width=64, window=1024),
            None,
            Layer(kind="full", kv_heads=4, key_width=64, value_width=64),
        ),
        depth=3,
        drafts=(3,),
        draft="tiny-eagle3",
    ),
    shard=Shard(tp_rank=1, tp_size=2),
    groups=(
        Group(kind="full", block_tokens=16, blocks=100),
        Group(kind="sliding", block_tokens=16, blocks=8, window=1024),
    ),
    regions=(Region(1 << 20),),
    planes=(_plane(0, "k", 0, (Step(16, 256),), BF16), _plane(0, "v", 8192, (Step(2, 8), Step(8, 16)), FP8)),
)
AGENT = AgentCard(name="prefill-0", incarnation="b00d5eed", address="tcp://127.0.0.1:7700", version="0.1.0")
RANKS = (
    Rank(tp_rank=0, pp_rank=0, address="tcp://127.0.0.1:7700"),
    Rank(tp_rank=1, pp_rank=0, address="tcp://127.0.0.1:7701"),
)
BLOCKS = (Blocks(0, 0, (17, 4, 99)), Blocks(1, 2, (7,)))
SCALES = (engine.Scales(0, "k", (0.5,)), engine.Scales(0, "v", (0.5, 0.25)))
TOKEN = bytes(range(16))
HANDLES = (
    Handle(region=0, kind="shm_fd", fd=0),
    Handle(region=0, kind="cuda_ipc", device="GPU-5d2e", payload=TOKEN * 4, offset=512),
)
SLOTS = status.SlotCounts(free=29, lent=1, landed=1, quarantined=1)

TO_AGENT: tuple[Any, ...] = (
    engine.Descriptors(),
    engine.Attach(versions=OURS, pool=POOL, handles=HANDLES),
    engine.Directory(ranks=RANKS),
    engine.Offer(
        number=7,
        rendezvous="cmpl-1",
        request="cmpl-1-a",
        tokens=40,
        blocks=BLOCKS,
        is_last=True,
        is_more=True,
        hold_s=30.0,
        fence=12,
        first_token=16,
    ),
    engine.Withdraw(number=7, reason="preempted", comes_again=True),
    engine.NoOffer(call="room/4711", code="prefill_refused", reason="prefill answered the call with status 404"),
    engine.Reclaim(blocks=47),
    engine.Release(),
    engine.Expect(number=1 << 50, rendezvous="cmpl-1", sender="tcp://127.0.0.1:7700"),
    engine.Want(
        number=1 << 50,
        request="cmpl-1-b",
        rendezvous="cmpl-1",
        sender="tcp://127.0.0.1:7700",
        first_token=16,
        end_token=40,
        blocks=BLOCKS,
        deadline_s=30.0,
        is_offered=True,
        offered_to=f"{AGENT.incarnation}/3",
    ),
    engine.Abandon(number=1 << 50, reason="aborted by the client"),
    engine.Computed(tokens=499, reason="untagged"),
    engine.Rescale(revision=2, scales=SCALES),
    engine.Weights(version="step-7"),
    engine.Decline(revision=1, reason="scales: requests have been computed under ours"),
    engine.Detach(),
    status.StatusQuery(),
    status.PoolQuery(),
    status.TraceQuery(names=("cmpl-1-b",)),
)
TO_ENGINE: tuple[Any, ...] = (
    engine.Attached(version=1, epoch=3, agent=AGENT),
    engine.Detached(epoch=3),
    engine.Refused(code="version_mismatch", reasons=("versions: agent 1-1, engine 2-3",)),
    engine.Released(number=7, request="cmpl-1-a", code="deadline", reason="hold_s: 30 s are over"),
    engine.Held(numbers=(7, 9)),
    engine.Done(number=1 << 50, request="cmpl-1-b", moved_bytes=49152, seconds=0.004, tokens=499),
    engine.Failed(
        number=1 << 50, request="cmpl-1-b", code="peer_lost", reason="tcp://127.0.0.1:7700 is silent for 5 s"
    ),
    engine.Rescaled(revision=2, epoch=4),
    engine.NewEpoch(epoch=5),
    engine.ReleasedAll(offers=3),
    engine.Adopt(revision=1, scales=SCALES),
    engine.KeptBy(sender="tcp://10.0.0.2:7700", rendezvous="kept-1", prefixes=(bytes(range(20)),)),
    status.Status(
        agent=AGENT,
        state="serving",
        uptime_s=12.5,
        fabric="nixl",
        security="loopback only",
        metrics="127.0.0.1:9400",
        slot_bytes=4 << 20,
        receive_slots=SLOTS,
        send_slots=status.SlotCounts(free=16, lent=0, landed=0, quarantined=0),
        engine=status.EngineStatus(
            engine="vllm 0.32.0",
            epoch=3,
            pid=4242,
            model="tiny",
            shard="tp 1/2",
            pool_bytes=1 << 20,
            planes=2,
            model_key="0123456789abcdef",
            traits=status.Traits(engine="vllm", tp_size=2, pp_size=1, cp_size=1, block_tokens="16", dtype="bf16"),
            protocol=1,
            size=status.PromptSize(token_bytes=128.0, prompt_bytes=4096.0, tokens=8192),
        ),
        peers=(
            status.PeerStatus(
                name="decode-0",
                address="tcp://127.0.0.1:7702",
                incarnation="feed",
                state="open",
                verdict="Same",
                route="nixl 12.5 GB/s in 4096 KiB (direct: the receiver allows nixl (routes))",
                route_name="nixl",
                bytes_per_s=12.5e9,
                key="decode",
                protocol=1,
                carried=3,
                carried_bytes=3 << 20,
                carried_s=0.0625,
            ),
        ),
        transfers=(
            status.TransferStatus(
                role="sender",
                request="cmpl-1-a",
                rendezvous="cmpl-1",
                peer="feed",
                state="flowing",
                chunks_done=1,
                chunks=3,
                age_s=0.25,
            ),
        ),
        counters={"kvbridge_chunks_total{role=sender}": 1.0},
        held=status.HeldCounts(offers=2, unclaimed=1, tokens=96),
        rebuild_refused="rebuild_refused",
        offers=(
            status.OfferStatus(
                request="cmpl-2-a",
                rendezvous="cmpl-2",
                state="awaited",
                peer="decode-0",
                tokens=1500,
                blocks=47,
                age_s=3.5,
                left_s=26.5,
            ),
        ),
        readers=(
            status.ReaderStatus(agent="decode-0", pid=4711, uid=1000, epoch=3, age_s=61.5, over_s=None),
            status.ReaderStatus(agent="decode-1", pid=4712, uid=1000, epoch=2, age_s=90.0, over_s=0.5),
        ),
        errors=(
            status.ErrorStatus(
                level="warning", logger="kvbridge.receiver", text="failed: request=cmpl-1-b code=peer_lost", age_s=4.5
            ),
        ),
        prompts=status.PromptCounts(
            fetched_tokens=3000,
            computed_tokens=1000,
            computed={"untagged": 1, "peer_lost": 2},
            released={"served": 5, "offer_expired": 1},
        ),
        refusals=(
            status.RefusalStatus(
                address="tcp://127.0.0.1:7703", code="incompatible", reason="head_dim: ours 64, theirs 128", age_s=2.5
            ),
        ),
    ),
    status.PoolStatus(pool=POOL, slot_bytes=4 << 20),
    status.Trace(
        agent=AGENT,
        entries=(
            status.TraceEntry(
                at_s=1763900000.25, what="wanted", request="cmpl-1-b", rendezvous="cmpl-1", text="tokens [16, 40)"
            ),
            status.TraceEntry(at_s=1763900000.26, what="claimed", request="cmpl-1-b", transfer="t1"),
            status.TraceEntry(at_s=1763900000.3, what="done", request="cmpl-1-b", text="49152 bytes", seconds=0.05),
        ),
    ),
)


def card(name: str, descriptor: bytes, base: int) -> peer.FabricCard:
    return peer.FabricCard(kind="nixl", name=name, descriptor=descriptor, base=base, slot_bytes=4 << 20, slots=32)


BODIES: tuple[Any, ...] = (
    peer.Hello(
        versions=OURS,
        agent=AGENT,
        epoch=3,
        pool=POOL,
        fabric=card("incarnation-1", b"\x00nixl\xff", 1 << 45),
        digests=("xxh3",),
        host=card("incarnation-1.host", b"\x00nixl\xfe", 1 << 46),
        device=peer.DeviceCard(machine="4c4c4544", uuid="GPU-5d2e", payload=TOKEN * 4),
        routes=("nixl", "host"),
        probe_lane=7,
        moves_units=True,
    ),
    peer.Welcome(
        version=1,
        agent=AGENT,
        epoch=3,
        pool=POOL,
        digest="xxh3",
        ranks=RANKS,
        slot_bytes=4 << 20,
        route="host",
        why="nixl: 0.31 GB/s measured, too slow to be right",
        probe=peer.Probe(lane=7, seed=99, size_bytes=65536, bytes_per_s=5.1e9),
        machine="4c4c4544",
        namespaces=(4026531836, 4026531839),
        process=peer.ProcessCard(pid=4711, started=8150),
        moves_units=True,
    ),
    peer.Refuse(code="incompatible", reasons=("key_width: sender 64, receiver 96",)),
    peer.Claim(
        transfer="2f6c1d",
        want="decode-9c/cmpl-1-b",
        receiver=0,
        receivers=1,
        rendezvous="cmpl-1",
        sender_epoch=3,
        receiver_epoch=1,
        first_token=16,
        end_token=40,
        takes=(peer.Take(0, 2, 2, 4), peer.Take(1, 2, 0, 1, "index_key")),
        plan="9f86d081",
        token=TOKEN,
        leases=(peer.SlotLease(5, 12), peer.SlotLease(6, 1)),
        deadline_s=29.5,
        is_offered=True,
    ),
    peer.BlockTables(transfer="2f6c1d", tokens=32, is_last=False, renewal=1, blocks=(Blocks(0, 1, (7, 3)),)),
    peer.Announce(number=5, rendezvous="cmpl-1", first_token=0, tokens=32, fence=9, blocks=(Blocks(0, 0, (7, 3)),)),
    peer.Renew(transfer="2f6c1d", number=1),
    peer.Check(transfer="2f6c1d", digests=(peer.Sum(0, 0x1F2E3D4C5B6A7988), peer.Sum(64, (1 << 64) - 1))),
    peer.Checked(transfer="2f6c1d", digests=(peer.Sum(0, 0x1F2E3D4C5B6A7988), peer.Sum(64, (1 << 64) - 1))),
    peer.Ready(transfer="2f6c1d", chunks=2),
    peer.Grant(transfer="2f6c1d", leases=(peer.SlotLease(7, 3),)),
    peer.Cancel(transfer="2f6c1d", code="aborted", reason="abandoned by the engine"),
    peer.Drained(transfer="2f6c1d"),
    peer.Failing(transfer="2f6c1d", code="write_failed", reason="the peer disconnected"),
    peer.Hold(rendezvous_ids=("cmpl-1", "cmpl-2")),
    peer.Keeps(rendezvous="kept-1", prefixes=(bytes(range(20)),)),
    peer.Settled(transfer="2f6c1d"),
    peer.Ping(number=7),
    peer.Pong(number=7),
    peer.Goodbye(reason="the agent is stopping"),
)
NOTICE = peer.Notice(
    transfer="2f6c1d",
    token=TOKEN,
    sender_incarnation="b00d5eed",
    receiver_incarnation="feed",
    sender_epoch=3,
    receiver_epoch=1,
    slot=5,
    generation=12,
    chunk=0,
    chunk_bytes=3 << 20,
    digest=(1 << 64) - 2,
)


TO_DOOR: tuple[Any, ...] = (
    door.OpenMemory(versions=OURS, session="feed/7", epoch=3, token=TOKEN * 2, agent="decode-0"),
)
FROM_DOOR: tuple[Any, ...] = (
    engine.Descriptors(),
    door.MemoryEnding(reason="engine left"),
    door.MemoryOpened(version=1, epoch=3, handles=HANDLES),
    engine.Refused(code="stale_epoch", reasons=("epoch: receiver 3, of the token 3, sender 4",)),
)


def enveloped(body: Any) -> peer.Envelope:
    return peer.Envelope(version=1, sender="feed", receiver="b00d5eed", number=11, body=body)


def tag(message: Any) -> str:
    """The tag a message travels under, as a file name."""
    return str(message.__struct_config__.tag).replace("?", "_query")


def frames() -> dict[str, tuple[Any, Any]]:
    """Golden name -> (the message a frame holds, the type to decode it as)."""
    named: dict[str, tuple[Any, Any]] = {}
    named |= {f"engine/{tag(message)}": (message, engine.ToAgent) for message in TO_AGENT}
    named |= {f"engine/{tag(message)}": (message, engine.ToEngine) for message in TO_ENGINE}
    named |= {f"door/{tag(message)}": (message, door.ToDoor) for message in TO_DOOR}
    named |= {f"door/{tag(message)}": (message, door.FromDoor) for message in FROM_DOOR}
    named |= {f"peer/{tag(body)}": (enveloped(body), peer.Envelope) for body in BODIES}
    return named | {"notice": (NOTICE, peer.Notice)}
