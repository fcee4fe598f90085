"""Engine <-> agent messages, over the agent's unix socket. Pure.

One engine rank holds one connection; its EOF proves that the rank is dead. `number` names an offer or a want in all
that the two say about it. It never comes again, so no late answer can be taken for the answer to another. `request` is
the engine's own name, for people to read; an engine may use it again. A rendezvous id is the same on both engines: each
makes it of a name that both were told and of a digest of its own request (kvbridge/adapters/engine/prompts.py,
adapters/vllm/rendezvous.py).
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from .common import (
    Address,
    AgentCard,
    AttachmentName,
    Blocks,
    Code,
    Prefixes,
    Ranks,
    Reasons,
    RendezvousId,
    Seconds,
    Traceparent,
    VersionRange,
)
from .pool import Count, Handle, Name, Pool, Positive
from .status import PoolQuery, PoolStatus, Status, StatusQuery, Trace, TraceQuery

Request = Annotated[str, Meta(min_length=1, max_length=256)]
MAX_HELD = 1024  # in one message
Number = Annotated[int, Meta(ge=1, lt=1 << 62)]
Numbers = Annotated[tuple[Number, ...], Meta(min_length=1, max_length=MAX_HELD)]
Tables = Annotated[tuple[Blocks, ...], Meta(max_length=256)]

# How long an engine that must compute on waits for the Released after its Withdraw, or after giving up its agent.
READERS_S = 1.0


class Scales(Struct, frozen=True, array_like=True):
    """The scales of one plane, as in `Codec.scales`: one for the plane or one per head."""

    layer: Annotated[int, Meta(ge=0, lt=1 << 16)]
    part: Annotated[str, Meta(max_length=32)]
    scales: Annotated[tuple[float, ...], Meta(min_length=1, max_length=4096)]


NewScales = Annotated[tuple[Scales, ...], Meta(max_length=65536)]


class Descriptors(Struct, frozen=True, kw_only=True, tag="descriptors"):
    """The fds beside this frame belong to the next message of another kind, and come before that message's own."""


class Attach(Struct, frozen=True, kw_only=True, tag="attach"):
    """Here is my memory. Answered by Attached or Refused.

    `fence_fd` is the index, among the descriptors beside the message, of a shared page whose first 8 bytes count what
    my stream has finished. Without it every Offer and Want is about work that is already finished.

    `policy` says what happens to rows that come under other scales than mine: they are requantized to mine, or I am
    asked (Adopt) to take the sender's. With `takes_kept` I want to hear what others keep (KeptBy).
    """

    versions: VersionRange
    pool: Pool
    handles: Annotated[tuple[Handle, ...], Meta(max_length=4096)]
    fence_fd: Annotated[int, Meta(ge=0, lt=1024)] | None = None
    policy: Literal["requantize", "adopt"] = "requantize"
    takes_kept: bool = False


class Directory(Struct, frozen=True, kw_only=True, tag="directory"):
    """The agents of all ranks of my engine. Replaces the Directory sent before."""

    ranks: Annotated[Ranks, Meta(min_length=1)]


class Offer(Struct, frozen=True, kw_only=True, tag="offer"):
    """These tokens are computed and may be read. Repeated under its number as the prompt grows.

    All but the first `is_more`. If the offer has ended meanwhile these are ignored: its Released is on the way.
    Tokens [first_token, tokens) of the request may be read. `first_token` is the same in every offer of it; the tables
    begin with the block that it lies in, and a claim of tokens before it fails with `tokens_missing`. `blocks` appends
    to the tables offered before. `is_last` says that no more will come. An offer of no tokens needs no blocks. The
    agent answers Released once nobody will read the blocks again: at the latest `hold_s` after the last Offer, or after
    the last Held that names it. The blocks may be read once the fence has reached `fence`.

    `first_token` and `tokens` count tokens of the request, the same on all ranks of an engine. `blocks` are this rank's
    (see Blocks): those that hold its share of these tokens, and none for a group in which it has none of them.

    With `prefixes` these are tokens kept for requests that begin with them, such as a prompt and its answer. The agents
    that the agent fetches from are told (Keeps in peer.py), if their engines want to hear it. Such an offer serves any
    number of wants, and each prolongs `hold_s`; it ends as `kept_no_longer`. So it does, unless it is read, if another
    begins with all its prefixes. All that is kept may hold `most_kept` blocks: what nobody reads makes room for this
    one, the least recently used first.
    """

    number: Number
    rendezvous: RendezvousId
    request: Request
    tokens: Count
    blocks: Tables
    is_last: bool
    is_more: bool = False
    hold_s: Seconds
    fence: Count = 0
    first_token: Count = 0
    traceparent: Traceparent = ""
    prefixes: Prefixes = ()
    most_kept: Positive | None = None


class Withdraw(Struct, frozen=True, kw_only=True, tag="withdraw"):
    """The offer is over (abort, preemption). Its Released follows once no read is under way, or has been sent already.

    Later claims fail at once, unless it `comes_again`: the same prompt will be offered again under its rendezvous id.
    """

    number: Number
    reason: Annotated[str, Meta(max_length=1024)] = ""
    comes_again: bool = False


class NoOffer(Struct, frozen=True, kw_only=True, tag="no_offer"):
    """A call has ended early: I offer nothing more for it. Not answered.

    `call` is what the rendezvous ids of its prompts have before their last slash. Claims under such ids of what is not
    offered fail with this code and reason: those that wait, and those that come within five minutes. Not those that
    come after a new offer under such an id.
    """

    call: RendezvousId
    code: Code
    reason: Annotated[str, Meta(max_length=1024)]


class Reclaim(Struct, frozen=True, kw_only=True, tag="reclaim"):
    """I am short of this many blocks. Repeated while I am.

    The agent releases offers that nobody has claimed or waits for, until they hold as many: kept answers before
    prompts, the oldest first, and those only that it saw computed a quarter of a second ago or before, when it was told
    that I am short. Each is answered by its Released (`reclaimed`); this message itself is not answered.
    """

    blocks: Positive


class Release(Struct, frozen=True, kw_only=True, tag="release"):
    """Release every offer that nobody has claimed, however young, and also if a request waits for it.

    From the engine, which pauses, or from a command. Each offer is answered by its Released (`reclaimed`), to the
    engine. A command is answered by ReleasedAll.
    """


class Expect(Struct, frozen=True, kw_only=True, tag="expect"):
    """This request is queued here without blocks. It will want this rendezvous from that sender.

    The sender's side is asked to hold its offer meanwhile. Ends with the Want of the same number, or with Abandon.
    Not answered.
    """

    number: Number
    rendezvous: RendezvousId
    sender: Address


class Want(Struct, frozen=True, kw_only=True, tag="want"):
    """Put tokens [first_token, end_token) of the rendezvous into these blocks. Answered once, by Done or Failed.

    Another want under the number of an open one is refused, and the open one goes on. `sender` is the agent of any rank
    of the prefilling engine; the others are found through it. An empty range, at any token, needs no blocks and tells
    the sender that nothing is needed: Done follows once all its ranks were told, whether anything is offered there yet
    or not. The blocks may be written once the fence has reached `fence`.

    By `request` and `common` a sender knows which claims are of one want. So an engine of several ranks gives both on
    all of them alike, and makes `common` another for each want. A rank that is alone needs none: it has the number.

    `is_offered` says that the prefill has ended: each offer that it makes under this id was made, and is there or over.
    So the want fails at once if none is there, instead of waiting for one. `offered_to` then names the attachment that
    took the offer at `sender` (see `attachment_name`), "" if that is not known. It decides only what the failure says.

    `first_token` and `end_token` count tokens of the request, the same on all ranks of an engine. `blocks` are this
    rank's (see Blocks): those that hold its share of these tokens, and none for a group in which it has none of them.
    So rank 1 of 2, with an interleave of 1 and blocks of 16, wants [10, 39) with entries 0 and 1 (its own are tokens
    11 to 37), [32, 39) with entry 1 alone, and [32, 33) without any.
    """

    number: Number
    request: Request
    rendezvous: RendezvousId
    sender: Address
    first_token: Count
    end_token: Count
    blocks: Tables
    deadline_s: Seconds
    fence: Count = 0
    traceparent: Traceparent = ""
    is_offered: bool = False
    offered_to: AttachmentName = ""
    common: Annotated[str, Meta(max_length=256)] = ""


class Abandon(Struct, frozen=True, kw_only=True, tag="abandon"):
    """I no longer want or expect this.

    A Want is still answered once, by Done or Failed. After that the blocks are the engine's again.
    """

    number: Number
    reason: Annotated[str, Meta(max_length=1024)] = ""


class Computed(Struct, frozen=True, kw_only=True, tag="computed"):
    """I compute `tokens` tokens of a prompt that another engine could have sent me; `reason` says why. Not answered.

    The prompt's last token does not count, nor do those that I already had. If a want failed, `reason` is its code.
    """

    tokens: Positive
    reason: Code


class Rescale(Struct, frozen=True, kw_only=True, tag="rescale"):
    """From here on rows are written under these scales. Answered by Rescaled or Refused.

    `revision` grows each time. Planes that are not named keep theirs. What was planned before fails with `rescaled`,
    and offers made before are over.
    """

    revision: Positive
    scales: NewScales


class Weights(Struct, frozen=True, kw_only=True, tag="weights"):
    """From here on rows are computed with these weights. Answered by NewEpoch.

    Engines exchange rows only under the same `version`. "" says that the weights may have changed and have no name yet:
    then rows are exchanged with nobody. Offers and wants made before are over (`other_weights`), whatever the version.
    """

    version: Name


class Decline(Struct, frozen=True, kw_only=True, tag="decline"):
    """I do not take the scales of the Adopt of this revision; wants that wait for them fail."""

    revision: Positive
    reason: Annotated[str, Meta(max_length=1024)]


class Detach(Struct, frozen=True, kw_only=True, tag="detach"):
    """I am leaving, or my memory is about to change. The agent unmaps it and answers Detached."""


class Attached(Struct, frozen=True, kw_only=True, tag="attached"):
    """If `is_shared`, other agents of this host may read your memory for as long as we promise them.

    A promise may outlive us, by less than READERS_S. If we end without Detached, keep what you have offered that long.
    """

    version: int
    epoch: Count
    agent: AgentCard
    is_shared: bool = False


class Detached(Struct, frozen=True, kw_only=True, tag="detached"):
    """I have let go of your memory: nothing touches it any more, and nothing that you asked for will be answered.

    The answer to Detach, and the last message of every agent that ends the attachment while it lives. A connection that
    ends without it has ended with its agent's process, whose kernels may outlive its sockets.
    """

    epoch: Count


class Refused(Struct, frozen=True, kw_only=True, tag="refused"):
    """Your last message was not accepted.

    `number` names the offer or want, which is then over. Or else `about` names the revision (`rescale 3`), or a second
    offer or want under the number of one that goes on (`want 7`). Neither is there for the connection.
    """

    code: Code
    reasons: Reasons
    about: Name = ""
    number: Annotated[int, Meta(ge=0, lt=1 << 62)] = 0


class Released(Struct, frozen=True, kw_only=True, tag="released"):
    """The blocks of this offer are yours again. `code` is empty if every receiver had what it wanted.

    `is_declined` if they wanted none of it. Said once for each offer.
    """

    number: Number
    request: Request
    code: Code = ""
    reason: Annotated[str, Meta(max_length=1024)] = ""
    is_declined: bool = False


class Held(Struct, frozen=True, kw_only=True, tag="held"):
    """A receiver still waits for these offers of yours: their `hold_s` begins anew."""

    numbers: Numbers


class Done(Struct, frozen=True, kw_only=True, tag="done"):
    """All wanted rows are in your blocks, those of `tokens` tokens.

    `unfilled_layers` counts the layers that the sender does not have, those of a draft model: their rows are zeros.
    `other_scores`: scores are as the sender keeps them, with a weight where yours have none, or without one where yours
    have one. Only if your pool `finishes_scores`.
    """

    number: Number
    request: Request
    moved_bytes: Count
    seconds: Seconds
    tokens: Count = 0
    unfilled_layers: Count = 0
    other_scores: bool = False


class Failed(Struct, frozen=True, kw_only=True, tag="failed"):
    """The want ended without its rows; nothing will write its blocks any more."""

    number: Number
    request: Request
    code: Code
    reason: Annotated[str, Meta(max_length=1024)]


class Rescaled(Struct, frozen=True, kw_only=True, tag="rescaled"):
    """The scales of this revision hold, under a new epoch."""

    revision: Count
    epoch: Count


class NewEpoch(Struct, frozen=True, kw_only=True, tag="new_epoch"):
    """The weights that you named hold, under this epoch."""

    epoch: Count


class ReleasedAll(Struct, frozen=True, kw_only=True, tag="released_all"):
    """To a command: this many offers were released."""

    offers: Count


class KeptBy(Struct, frozen=True, kw_only=True, tag="kept_by"):
    """The agent `sender` offers the tokens of these prefixes under this id; without any: no longer.

    Prefix i are a request's first (i + 1) * PREFIX_TOKENS tokens. Only to an engine that `takes_kept`.
    """

    sender: Address
    rendezvous: RendezvousId
    prefixes: Prefixes = ()


class Adopt(Struct, frozen=True, kw_only=True, tag="adopt"):
    """A sender has these scales for your planes. Answered by Rescale of the same revision, or by Decline."""

    revision: Positive
    scales: NewScales


ToAgent = (
    Descriptors
    | Attach
    | Directory
    | Offer
    | Withdraw
    | NoOffer
    | Reclaim
    | Release
    | Expect
    | Want
    | Abandon
    | Computed
    | Rescale
    | Weights
    | Decline
    | Detach
    | StatusQuery
    | PoolQuery
    | TraceQuery
)
ToEngine = (
    Attached
    | Detached
    | Refused
    | Released
    | Held
    | Done
    | Failed
    | Rescaled
    | NewEpoch
    | ReleasedAll
    | KeptBy
    | Adopt
    | Status
    | PoolStatus
    | Trace
)
