"""The engine's side of `vllm_pairs`: an engine loop that also makes weights and watches vLLM's own connector."""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from tests.system.engines import marks, weights
from tests.system.engines.engine_loop import Loop

LIKELY = 20  # vLLM's own limit for the tokens whose probabilities it tells


def load_seeded(worker: Any, seed: int) -> None:
    """On a worker: weights that any sharding of this model shares, through vLLM's own loader."""
    import torch

    model = worker.get_model()
    like = torch.empty(0, dtype=torch.bfloat16, device=worker.device)
    with torch.no_grad():
        model.load_weights(weights.seeded(worker.vllm_config.model_config.hf_config.to_dict(), like, seed))
    torch.cuda.empty_cache()


def digests_of(worker: Any) -> dict[str, int]:
    """On a worker."""
    return weights.digests(worker.get_model())


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
    """Ops beside the loop's own: `weights`, `digests`, `transfers`, `likely`."""

    def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
        self.nixl: list[dict[str, float]] = []
        if (config["more"].get("kv_transfer_config") or {}).get("kv_connector", "").startswith("Nixl"):
            watch_nixl(self.nixl)
        if marks.VARIABLE in os.environ:
            marks.watch()
        super().__init__(control, config)

    def weights(self, seed: int) -> None:
        """Without them vLLM's own dummy weights stay, which engines of one size share and others do not."""
        try:
            self.engine.collective_rpc(load_seeded, args=(seed,))
        except Exception as error:  # whatever another vLLM has changed in its loader
            self.say(kind="weights", failure=f"{type(error).__name__}: {error}")
            return
        self.say(kind="weights", failure="")

    def digests(self) -> None:
        """Of the first rank's weights."""
        self.say(kind="digests", digests=self.engine.collective_rpc(digests_of)[0])

    def transfers(self) -> None:
        """What came in since the last time."""
        found, self.nixl[:] = list(self.nixl), []
        self.say(kind="transfers", transfers=found)

    def likely(self, request: str, tokens: list[int], amount: int) -> None:
        """What it says, and the log probabilities of the likeliest tokens at each place; it has nothing else to do."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=amount, ignore_eos=True, detokenize=False, logprobs=LIKELY)
        self.engine.add_request(request, {"prompt_token_ids": tokens}, sampling)
        last = None
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                last = output.outputs[0]  # all so far
        assert last is not None
        places = [{str(token): each.logprob for token, each in place.items()} for place in last.logprobs]
        self.say(kind="likely", tokens=list(last.token_ids), places=places)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    PairLoop(control, json.loads(sys.argv[2])).run()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
