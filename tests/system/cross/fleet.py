"""Real vLLM engines and real SGLang servers of one model, each rank beside a real agent."""

from __future__ import annotations

import os
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from tests.system.engines import fleet as vllm
from tests.system.engines.engine_process import Rows
from tests.system.sglang import fleet as sglang
from tests.system.sglang import rows
from tests.system.sglang.fleet import Answer, answer_of

TOKENS = sglang.TOKENS


class Cross:
    """Both fleets; a prompt goes from one engine of one to one engine of the other."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        python = os.environ["KVBRIDGE_TEST_VLLM_PYTHON"]
        (folder / "vllm").mkdir()
        self.vllm = vllm.Fleet(folder / "vllm", stack, dtype="float32", python=python)
        self.sglang = sglang.Fleet(folder / "sglang", stack)

    @staticmethod
    def room() -> int:
        return random.SystemRandom().randrange(1, 1 << 63)

    def to_sglang(self, source: str, sink: str, tokens: list[int], **more: Any) -> tuple[Answer, rows.Rows, rows.Rows]:
        """vLLM prefills, SGLang decodes: the answer, the rows that were given and those that were taken."""
        server = self.sglang[sink]  # up before anything is held for it
        room, request = self.room(), self.vllm.name(f"p-{source}")
        prefilled = self.vllm[source].run(request, tokens, 1, vllm.PREFILL | {"bootstrap_room": room})
        given = joined(self.vllm.rows(source, request, 0, len(tokens)))
        status, said = server.generate(self.decode_body(sink, tokens, room, prefilled, **more))
        assert status == 200, said
        return answer_of(said), given, self._kept("decode", sink, room)

    def decode_body(self, sink: str, tokens: list[int], room: int, prefilled: Any, **more: Any) -> dict[str, Any]:
        """What a router sends to SGLang's decode server when vLLM has prefilled."""
        params = prefilled.params
        told = {
            "source": f"tcp://{params['remote_host']}:{params['remote_port']}",
            "first_token": prefilled.tokens[0],
            "rendezvous": params["remote_request_id"],
        }
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        return {
            "input_ids": tokens,
            "sampling_params": sampling | {"custom_params": {"kvbridge": told | more}},
            "bootstrap_host": "kvbridge",
            "bootstrap_room": room,
        }

    def to_vllm(self, source: str, sink: str, tokens: list[int]) -> tuple[list[int], int, rows.Rows, rows.Rows]:
        """SGLang prefills, vLLM decodes, asked at once: the tokens, how many were not computed, both sides' rows."""
        room, request = self.room(), self.vllm.name(f"d-{sink}")
        host, _, port = self.sglang.agents[source][0].address.removeprefix("tcp://").partition(":")
        where = {"remote_host": host, "remote_port": int(port)}
        fetched = {"do_remote_prefill": True, "do_remote_decode": False, "bootstrap_room": room, **where}
        begun = self.sglang[source].begin(self.prefill_body(tokens, room))
        answer = self.vllm[sink].run(request, tokens, TOKENS, fetched)
        taken = joined(self.vllm.rows(sink, request, 0, len(tokens) - 1))
        assert begun.getresponse().status == 200
        begun.close()
        given = self._kept("prefill", source, room)
        short = rows.Rows({key: each[: len(tokens) - 1] for key, each in given.rows.items()}, given.codec)
        return list(answer.tokens), answer.cached, short, taken

    @staticmethod
    def prefill_body(tokens: list[int], room: int) -> dict[str, Any]:
        """What a router sends to SGLang's prefill server when vLLM is to decode."""
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        return {
            "input_ids": tokens,
            "sampling_params": sampling | {"custom_params": {"kvbridge": {"fetched_by": "vllm"}}},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_room": room,
        }

    def _kept(self, side: str, name: str, room: int) -> rows.Rows:
        return rows.load(self.sglang.kept, side, room, sglang.CONFIGS[name].shards)


def joined(found: Rows) -> rows.Rows:
    """vLLM's as SGLang's are: [tokens, heads, bytes]."""
    (codec,) = {each["name"] for each in found.codecs.values()}
    return rows.Rows({key: np.swapaxes(each, 0, 1) for key, each in found.rows.items()}, codec)
