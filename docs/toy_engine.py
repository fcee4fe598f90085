"""Two toy engines that share no layout, and their adapter: `python toy_engine.py PREFILL_SOCKET DECODE_SOCKET`."""

import logging
import sys
import time
from contextlib import closing

import torch
from kvbridge_proto.common import Blocks, Rank
from kvbridge_proto.engine import Offer, Want
from kvbridge_proto.pool import Codec, Engine, Group, Layer, Model, Plane, Pool, Region, Shard, Step

from kvbridge.adapters.engine.client import EngineClient
from kvbridge.adapters.engine.conversation import Conversation, Ended
from kvbridge.adapters.engine.memory import Memory

LAYERS, HEADS, WIDTH, BLOCKS = 2, 4, 32, 64
CODECS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def kv_of(prompt: torch.Tensor) -> torch.Tensor:
    """What our "model" computes: [layer, K or V, token, head, element], small whole numbers."""
    place = torch.arange(LAYERS * 2 * HEADS * WIDTH).reshape(LAYERS, 2, 1, HEADS, WIDTH)
    return (prompt[:, None, None] * 31 + place * 7) % 255 - 127


class ToyEngine:
    """One engine of one rank: a paged KV cache, and its conversation with the agent beside it."""

    def __init__(self, name: str, socket: str, block_tokens: int, dtype: torch.dtype, heads_first: bool) -> None:
        self.block_tokens = block_tokens
        if heads_first:
            cache = torch.zeros(LAYERS, 2, BLOCKS, HEADS, block_tokens, WIDTH, dtype=dtype).transpose(3, 4)
        else:
            cache = torch.zeros(LAYERS, 2, BLOCKS, block_tokens, HEADS, WIDTH, dtype=dtype)
        self.cache = cache  # [layer, K or V, block, token, head, element], whatever its strides are
        self.free = torch.randperm(BLOCKS).tolist()
        self.blocks: dict[str, list[int]] = {}  # of each request, in token order
        self.ended: dict[str, Ended] = {}
        memory = Memory(self.describe(name), (cache.untyped_storage(),))
        self.talk = Conversation(EngineClient(socket), memory, logging.getLogger(name))

    def describe(self, name: str) -> Pool:
        """Every (layer, K or V) is a plane: where its first byte is, and how far it is to the next of each kind."""
        size = self.cache.element_size()
        block, token, head, element = (step * size for step in self.cache.stride()[2:])
        codec = Codec(name=CODECS[self.cache.dtype], width=WIDTH, element_bytes=size, row_bytes=WIDTH * size)
        planes = tuple(
            Plane(
                layer=layer,
                part=part,
                offset=self.cache[layer, half].storage_offset() * size,
                block_stride=block,
                token_axis=(Step(self.block_tokens, token),),
                head_stride=head,
                element_axis=(Step(WIDTH, element),),
                first_head=0,
                heads=HEADS,
                total_heads=HEADS,
                codec=codec,
            )
            for layer in range(LAYERS)
            for half, part in enumerate("kv")
        )
        layer = Layer(kind="full", kv_heads=HEADS, key_width=WIDTH, value_width=WIDTH)
        return Pool(
            engine=Engine(kind="toy", version="1", id=name),
            model=Model(name="toy", layers=(layer,) * LAYERS),
            shard=Shard(),
            groups=(Group(kind="full", block_tokens=self.block_tokens, blocks=BLOCKS),),
            regions=(Region(self.cache.untyped_storage().nbytes()),),
            planes=planes,
        )

    def attach(self) -> None:
        """At start-up. An engine that gets False serves all the same, and computes everything itself."""
        assert self.talk.start(30), self.talk
        self.talk.share([Rank(tp_rank=0, pp_rank=0, address=self.talk.address)])

    def allocate(self, request: str, tokens: int) -> None:
        self.blocks[request] = [self.free.pop() for _ in range(-(-tokens // self.block_tokens))]

    def places(self, request: str, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        token = torch.arange(first, end)
        return torch.tensor(self.blocks[request])[token // self.block_tokens], token % self.block_tokens

    def compute(self, request: str, prompt: torch.Tensor, first: int, end: int) -> None:
        block, offset = self.places(request, first, end)
        self.cache[:, :, block, offset] = kv_of(prompt[first:end]).to(self.cache.dtype)

    def read(self, request: str, end: int) -> torch.Tensor:
        block, offset = self.places(request, 0, end)
        return self.cache[:, :, block, offset]

    def prefill(self, request: str, prompt: torch.Tensor, chunk: int = 40) -> None:
        """Chunk by chunk, and each is offered once it is computed, with the blocks that were not offered before."""
        self.allocate(request, len(prompt))
        number, offered = self.talk.new_number(), 0
        for first in range(0, len(prompt), chunk):
            end = min(first + chunk, len(prompt))
            self.compute(request, prompt, first, end)
            more = self.blocks[request][offered : -(-end // self.block_tokens)]
            pieces = (Blocks(0, offered, tuple(more)),) if more else ()
            offered += len(more)
            names = {"number": number, "request": request, "rendezvous": request}
            ends = {"is_more": first > 0, "is_last": end == len(prompt), "hold_s": 30}
            self.talk.offer(Offer(**names, **ends, tokens=end, blocks=pieces))

    def fetch(self, request: str, sender: str, end: int) -> None:
        self.allocate(request, end)
        to = (Blocks(0, 0, tuple(self.blocks[request])),)
        names = {"number": self.talk.new_number(), "request": request, "rendezvous": request}
        self.talk.want(Want(**names, sender=sender, first_token=0, end_token=end, blocks=to, deadline_s=9))

    def step(self) -> None:
        """In each step, and never blocking: hear what has ended. From here on those blocks are ours again."""
        for heard in self.talk.turn():
            if isinstance(heard, Ended):
                self.ended[heard.request] = heard  # the toy uses each name once; an engine looks at heard.number
                if heard.kind == "offer":
                    self.free += self.blocks.pop(heard.request)


def main(prefill_socket: str, decode_socket: str) -> None:
    prompt = torch.randint(0, 1000, (100,))
    sender = ToyEngine("prefill", prefill_socket, block_tokens=16, dtype=torch.bfloat16, heads_first=False)
    receiver = ToyEngine("decode", decode_socket, block_tokens=24, dtype=torch.float32, heads_first=True)
    with closing(sender.talk), closing(receiver.talk):
        sender.attach()
        receiver.attach()
        receiver.fetch("prompt 1", sender.talk.address, len(prompt) - 1)  # the last token is computed in any case
        sender.prefill("prompt 1", prompt)
        while "prompt 1" not in sender.ended or "prompt 1" not in receiver.ended:
            sender.step()
            receiver.step()
            time.sleep(0.001)
        fetched = receiver.ended["prompt 1"]
        if not fetched.is_good:  # never an error: what cannot be fetched is computed here
            print(f"not fetched: {fetched.code}: {fetched.reason}")
            receiver.compute("prompt 1", prompt, 0, len(prompt) - 1)
        same = torch.equal(receiver.read("prompt 1", len(prompt) - 1), kv_of(prompt[:-1]).float())
        print(f"fetched: {fetched.is_good}; all numbers of 99 tokens are {'right' if same else 'WRONG'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
