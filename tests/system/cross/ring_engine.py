"""vLLM's scheduler, worker and DeepSeek V4.1's caches in a process of their own, beside an agent: see rings.py.

`python -m tests.system.cross.ring_engine FOLDER FORM`. Calls come over the socket `vllm` there, one at a time. A row
that is read and is not what was computed ends the process.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from testing.agents import agent
from tests.integration.adapters.compressed import MXFP4_KEY, Engine
from tests.integration.adapters.rings import BLOCK, v41

FORMS = {"fp8_ds_mla": 528, "nvfp4_ds_mla": 288}  # bytes of a compressed row; of a window's 528


def main(folder: Path, form: str) -> None:
    of_form = partial(v41, window_row=528, row=FORMS[form], index=MXFP4_KEY)
    with agent(folder, "vllm-agent", slot_bytes=1 << 20) as running, Listener(str(folder / "vllm")) as listener:
        engine = Engine(folder / "engine", [running], form, caches=of_form, block=BLOCK, hashed=32, budget=100)
        while engine.workers[0].worker._conversation.attached is None:
            engine.step()
            time.sleep(0.001)
        engine.steps(3)  # the scheduler hears of it
        with listener.accept() as calls:
            while True:
                try:
                    if calls.poll():
                        calls.send(answer(engine, **calls.recv()))
                except EOFError:
                    return
                engine.step()
                time.sleep(0.001)


def answer(engine: Engine, prompt: list[int], max_tokens: int, **params: Any) -> tuple[Any, int]:
    """Run a request: what its router is told, and how many tokens were computed for it."""
    request, said = engine.request(prompt=prompt, max_tokens=max_tokens, **params), None
    while not request.is_finished():
        for output in getattr(engine.step(), "outputs", ()):
            said = output.kv_transfer_params or said
        time.sleep(0.001)
    return said, engine.computed[request.request_id]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
