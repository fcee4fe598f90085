"""What the demo keeps of a vLLM engine's rows: both ranks' heads, under the side's name. Needs no vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from demo.rows import load
from demo.vllm_rows import _keep, before_free

TOKENS, HEADS = 5, 4
ROWS = np.arange(HEADS * TOKENS * 8, dtype=np.uint8).reshape(HEADS, TOKENS, 8)


class Core:
    """An engine core of two ranks, with one request's blocks until they are freed."""

    def __init__(self) -> None:
        self.tables: dict[str, tuple[list[int], ...]] = {"one": ([3, 1],)}
        self.scheduler = SimpleNamespace(
            kv_cache_manager=SimpleNamespace(free=self._free, pop_blocks_for_free=self._free)
        )
        self.scheduler.kv_cache_manager.get_block_ids = lambda name: self.tables.get(name, ([],))
        self.is_kept_first = False

    def _free(self, request: Any) -> None:
        self.is_kept_first = bool(list(Path.cwd().iterdir()))
        del self.tables[request.request_id]

    def collective_rpc(self, method: Any, args: Any) -> list[Any]:
        assert args == (([3, 1],), 0, TOKENS)
        codec = {"name": "fp32"}
        return [{"0.k": (first, HEADS, codec, ROWS[first : first + 2])} for first in (0, 2)]


@pytest.mark.parametrize("free", ["free", "pop_blocks_for_free"])
@pytest.mark.parametrize(
    ("params", "side"),
    [
        ({"do_remote_decode": True, "bootstrap_room": 7}, "prefill"),
        # As the adapter leaves it once the prompt has come.
        ({"do_remote_prefill": False, "do_remote_decode": False, "bootstrap_room": 7}, "decode"),
        ({"do_remote_prefill": False, "bootstrap_room": 7}, "decode"),
        ({"do_remote_prefill": False, "remote_request_id": "room/7/0f"}, "decode"),  # vLLM has prefilled it
    ],
)
def test_rows_are_kept_before_their_blocks_are_freed(
    free: str, params: dict[str, Any], side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    core = Core()
    manager = core.scheduler.kv_cache_manager
    before_free(manager, lambda request: _keep(core, request))
    getattr(manager, free)(SimpleNamespace(request_id="one", kv_transfer_params=params, num_prompt_tokens=TOKENS))
    assert core.is_kept_first and not core.tables
    assert np.array_equal(load(tmp_path, side, 7, 1).rows[0, "k"], ROWS.swapaxes(0, 1))


@pytest.mark.parametrize("params", [None, {"do_remote_decode": True}])
def test_requests_without_a_room_leave_nothing(
    params: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _keep(Core(), SimpleNamespace(request_id="one", kv_transfer_params=params, num_prompt_tokens=TOKENS))
    assert not list(tmp_path.iterdir())
