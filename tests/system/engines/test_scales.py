"""A real engine takes the scales of the engine that prefills for it, so bytes are moved as they are."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.system.engines.fleet import Fleet, needs_fp8, prompt
from tests.system.engines.kinds import write_scaled
from tests.system.sglang.rows import assert_carried

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400), needs_fp8]


def test_takes_the_scales_of_the_sender_and_its_bytes(tmp_path: Path) -> None:
    with ExitStack() as stack:
        sender = Fleet(tmp_path / "p", stack, write=write_scaled)
        receiver = Fleet(tmp_path / "d", stack, options={"kvbridge_scales": "adopt"})
        sender.start("fp8")
        receiver.start("large-fp8")
        for seed, length in enumerate((300, 40)):
            tokens = prompt(length, seed)
            given, prefilled = sender.prefill("fp8", tokens)
            ours = sender.rows("fp8", given, 0, length - 1)
            wanted = receiver.name("d")
            answer = receiver["large-fp8"].run(wanted, tokens, 12, prefilled.params)
            theirs = receiver.rows("large-fp8", wanted, 0, length - 1)
            assert answer.cached == length - 1, "the prompt did not travel, it was computed again"
            assert_carried(ours, theirs)
            assert theirs.codecs == ours.codecs
            scales = {codec["scales"][0] for codec in ours.codecs.values()}
            assert len(scales) == len(ours.codecs) and max(scales) < 0.2
            ours_after = sender["fp8"].run(sender.name("same"), tokens, 12)
            assert answer.tokens == ours_after.tokens
        assert "adopt_refused" not in receiver.agents["large-fp8"][0].text()
