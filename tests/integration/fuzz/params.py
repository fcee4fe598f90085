"""What strangers send to a decode engine: `kv_transfer_params` and the request's id, as vLLM's scheduler has them."""

from __future__ import annotations

import json
from random import Random
from types import SimpleNamespace
from typing import Any

from kvbridge_proto.engine import ToAgent
from kvbridge_proto.framing import HEADER, decode, pack

from kvbridge.adapters.vllm.params import read_remote
from kvbridge.adapters.vllm.rendezvous import message_name, named, offered_rendezvous, prompt_digest, wanted_rendezvous
from kvbridge.errors import EngineError
from tests.integration.fuzz.target import Target
from tests.unit.exchange.network import offer_of, want_of

NAMES = ("remote_request_id", "remote_host", "remote_port", "remote_key")
TEXTS = (
    *("", "r", "r/0/0123456789abcdef0123456789abcdef01234567", "r/٣/0123456789abcdef0123456789abcdef01234567"),
    *("\ud800/1/0123456789abcdef0123456789abcdef01234567",),
    *("/" + "9" * 206 + "/0123456789abcdef0123456789abcdef01234567", "10.0.0.1", "fd00::1", "host\udfff", "\x00"),
    *("\x1b[2J\n", "%s{0}", "日本" * 64, "x" * 240, "x" * 255, "x" * 256, "x" * 5000),
    *("rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7",),
)
IDS = (
    *("cmpl-{}-0-1a2b3c4d", "chatcmpl-{}-1a2b3c4d", "generate-tokens-{}-1a2b3c4d", "0_cmpl-{}-0-1a2b3c4d"),
    *("cmpl-{}", "{}", "1_" * 50 + "{}"),
)
LONG_IDS = ("9" * 50_000, "1_" * 20_000, "0_cmpl-" * 8000, "a-" * 20_000, "x-" + "9" * 5000, "-99999999" * 5000)
ODD = (None, True, -1, 7700, 1 << 64, 1 << 70, 0.5, [], ["x"], {"a": {}}, {})


class Params(Target):
    """`read_remote` gives EngineError `bad_params`, or what an agent takes in a message; rendezvous ids have no worse
    end."""

    name = "params"

    def frame(self, random: Random) -> bytes:
        said = {name: self._value(random) for name in NAMES if random.random() < 0.85}
        known = {"remote_host": "10.0.0.1", "remote_port": 7700}
        request_id = random.choice(IDS).format(random.choice(LONG_IDS) if random.random() < 0.02 else _text(random))
        prompt = [random.randrange(1 << 17) for _ in range(random.choice((0, 1, 3, 40)))]
        params = said | (known if random.random() < 0.5 else {})
        if random.random() < 0.3:
            params["remote_request_id"] = offered_rendezvous(request_id, _digest(prompt))
        text = json.dumps([params, request_id, prompt])
        if random.random() < 0.1:
            at = random.randrange(len(text))
            text = text[:at] + random.choice('"\\[]{}9-u,:') + text[at + random.randrange(3) :]
        return text.encode()

    def _value(self, random: Random) -> Any:
        return _text(random) if random.random() < 0.8 else random.choice(ODD)

    def run(self, frame: bytes) -> int:
        try:
            params, request_id, prompt = json.loads(frame)
        except (ValueError, TypeError, RecursionError):
            return 1
        is_ours = isinstance(params, dict) and isinstance(request_id, str) and request_id and isinstance(prompt, list)
        if not is_ours or not all(type(token) is int and 0 <= token < 1 << 31 for token in prompt):
            return 1  # the engine looks at these itself
        digest = _digest(prompt)
        name, rendezvous = message_name(request_id), offered_rendezvous(request_id, digest)
        assert named(request_id).index >= 0
        _check(offer_of(name, 0, (), rendezvous=rendezvous))
        try:
            remote = read_remote(params)
        except EngineError as error:
            assert error.code == "bad_params" and len(str(error)) < 500 and str(error).isprintable()
            return 1
        wanted = wanted_rendezvous(remote.request, request_id, 0, digest)
        assert wanted == rendezvous or remote.request != rendezvous, "a request finds its own rendezvous again"
        for each in (wanted or remote.request, remote.request):  # the latter where it is declined
            _check(want_of(name, 0, (), rendezvous=each, sender=remote.sender))
        return 1


def _digest(prompt: list[int]) -> str:
    return prompt_digest(
        SimpleNamespace(prompt_token_ids=prompt, prompt_embeds=None, mm_features=[], lora_request=None, cache_salt=None)
    )


def _check(message: Any) -> None:
    """An agent takes it, and it is the same there."""
    assert decode(pack(message)[HEADER.size :], ToAgent) == message


def _text(random: Random) -> str:
    if random.random() < 0.8:
        return random.choice(TEXTS)
    return "".join(random.choice(TEXTS)[:8] for _ in range(random.randrange(4)))
