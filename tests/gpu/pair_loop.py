"""The engine's side of `pairs`: an engine loop that also makes weights on its GPU and watches vLLM's own connector."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

from tests.engines.engine_loop import Loop

LIKELY = 20  # vLLM's own limit for the tokens whose probabilities it tells


def load_seeded(worker: Any, seed: int) -> int:
    """On a worker: weights that any sharding of this model shares, through vLLM's own loader. Returns how many."""
    import torch

    from kvbridge.demo.model import GAINS, _shapes

    device = worker.device
    shapes = _shapes(worker.vllm_config.model_config.hf_config.to_dict())

    def weights() -> Iterator[tuple[str, Any]]:
        for number, (name, shape) in enumerate(shapes.items()):
            if name.endswith("norm.weight"):
                yield name, torch.ones(shape, dtype=torch.bfloat16, device=device)
                continue
            generator = torch.Generator(device).manual_seed(seed + number)
            values = torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)
            if "embed_tokens" not in name:
                gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
                values *= gain / math.sqrt(shape[1])
            yield name, values

    with torch.no_grad():
        worker.get_model().load_weights(weights())
    torch.cuda.empty_cache()
    return len(shapes)


def watch_nixl(found: list[dict[str, float]]) -> None:
    """Every transfer of vLLM's NixlConnector, as its own telemetry has it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

    record = NixlKVConnectorStats.record_transfer

    def record_and_keep(self: Any, telemetry: Any) -> Any:
        found.append(
            {
                "ms": telemetry.xferDuration / 1e3,  # counts from the start of posting
                "post_ms": telemetry.postDuration / 1e3,
                "bytes": telemetry.totalBytes,
                "descriptors": telemetry.descCount,
            }
        )
        return record(self, telemetry)

    NixlKVConnectorStats.record_transfer = record_and_keep


class PairLoop(Loop):
    """Ops beside the loop's own: `weights`, `transfers`, `likely`."""

    def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
        self.nixl: list[dict[str, float]] = []
        if (config["more"].get("kv_transfer_config") or {}).get("kv_connector", "").startswith("Nixl"):
            watch_nixl(self.nixl)
        super().__init__(control, config)

    def weights(self, seed: int) -> None:
        """Without them vLLM's own dummy weights stay, which engines of one size share and others do not."""
        try:
            self.engine.collective_rpc(load_seeded, args=(seed,))
        except Exception as error:  # whatever another vLLM has changed in its loader
            self.say(kind="weights", failure=f"{type(error).__name__}: {error}")
            return
        self.say(kind="weights", failure="")

    def transfers(self) -> None:
        """What came in since the last time."""
        found, self.nixl[:] = list(self.nixl), []
        self.say(kind="transfers", transfers=found)

    def likely(self, request: str, tokens: list[int]) -> None:
        """The log probabilities of the tokens that may come next; the engine has nothing else to do."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=LIKELY)
        self.engine.add_request(request, {"prompt_token_ids": tokens}, sampling)
        found: dict[str, float] = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.outputs[0].logprobs:
                    found = {str(token): each.logprob for token, each in output.outputs[0].logprobs[0].items()}
        self.say(kind="likely", logprobs=found)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    PairLoop(control, json.loads(sys.argv[2])).run()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
