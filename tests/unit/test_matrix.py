"""Every case of the matrix: the verdict agrees with the result of carrying it, and with the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from kvbridge_proto.pool import CodecName

from kvbridge.adapters.engine import codecs, memory
from kvbridge.adapters.vllm import dtypes
from kvbridge.cache_kinds import CACHE_KINDS
from kvbridge.errors import KVBridgeError
from kvbridge.geometry.compat import Incompatible, verdict
from kvbridge.geometry.wire import POWERS
from testing.carried import BothWays, OnCpu, carried, filled, pools_of
from testing.matrix import ROWS, Row
from testing.pools import ranks_of
from tests.support.write_matrix import PAGE, page

pytestmark = pytest.mark.proves("G4", "G7", "G22")

PULLED_TOO = {
    *("equal", "codecs", "scales", "row scales", "row scales of equal sides", "block scales"),
    *("latents", "packed latents", "windows", "states", "anything at once"),
}
REASON = re.compile(r"^\w+: sender .+, receiver .+; needs .+$")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_the_verdict_says_is_what_carrying_it_gives(row: Row) -> None:
    """All of a row can be carried, or nothing; of some rows, the same by pulls."""
    kind = BothWays if row.name in PULLED_TOO else OnCpu
    verdicts = set()
    for number, case in enumerate(row.cases()):
        given, carrier = filled(case), kind()
        for rank in row.ranks(case, number):
            found = verdict(*pools_of(case, rank))
            verdicts.add(isinstance(found, Incompatible))
            if isinstance(found, Incompatible):
                assert all(REASON.match(reason) for reason in found.reasons), found.reasons
                with pytest.raises((KVBridgeError, ValueError)):  # ValueError: at the copier's door
                    carried(case, rank, carrier, given)
                continue
            _, wrong = carried(case, rank, carrier, given)
            assert not wrong, f"case {number}: {wrong}\n{case.sender}\n{case.receiver}\nfrom {case.first}, {found}"
    assert len(verdicts) == 1


def test_the_page_is_fresh() -> None:
    assert Path(PAGE).read_text() == page(), "python -m tests.support.write_matrix"


def test_tokens_and_heads_that_are_split_are_carried_to_every_rank() -> None:
    """Which rank of the receiver has a gap, if one has, is not to be known beforehand."""
    for row in ROWS:
        if "parallel" in row.name or row.name == "latent ranks":
            numbers = {len(row.ranks(case, 0)) for case in row.cases()}
            assert max(numbers) == max(len(ranks_of(case.receiver)) for case in row.cases()) > 1


def test_every_kind_of_cache_is_carried() -> None:
    assert {kind for row in ROWS for case in row.cases() for kind in case.sender.kinds} == set(CACHE_KINDS)


def test_the_page_says_what_the_adapter_refuses() -> None:
    ours = set(get_args(CodecName)) - {"opaque"}
    described = {*memory.CODEC_OF.values(), *codecs.CODEC_PER_TOKEN_HEAD.values(), *dtypes.LATENT.values()}
    described |= {rows.name for rows, _ in dtypes.V4_LATENT.values()}
    described |= {*POWERS, "mxfp4"}  # of index keys and their scales
    described |= {codec for of_engine in codecs.BLOCK_SCALED.values() for codec in of_engine.values()}
    assert ours - described == {"int8"}
    said = page().partition("## What adapters refuse")[2]
    assert all(name in said for name in ("The vLLM adapter refuses", "recurrent states", "MXFP8", "NVFP4"))
    assert "nothing moves a refused pair without an error" in " ".join(page().split("|")[0].split())
