"""Real engines of a model that keeps a latent: every rank gets every byte of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from .fleet import Fleet, assert_equal_rows, prompt
from .kinds import LATENT, ROPE, write_latent

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        fleet = Fleet(tmp_path_factory.mktemp("latents"), stack, dtype="float32", write=write_latent)
        fleet.start("sixteen", "two-sixteen")
        yield fleet


@pytest.mark.parametrize(("source", "sink"), [("sixteen", "two-sixteen"), ("two-sixteen", "sixteen")])
@pytest.mark.parametrize("length", [2, 17, 300])
def test_every_rank_gets_the_latent_whatever_the_number_of_ranks(
    latents: Fleet, source: str, sink: str, length: int
) -> None:
    """Rows only: of a model with latents vLLM's CPU backend says other tokens when it computes the last token of the
    prompt alone, as one that fetched the rest does, than when it computes it with the others; without us, too."""
    tokens = prompt(length, seed=length + 1 + (source == "sixteen"))
    answer, ours, theirs = latents.crossed(source, sink, tokens)
    assert answer.cached == len(tokens) - 1, "the prompt did not travel, it was computed again"
    assert_equal_rows(ours, theirs)
    assert {part for _, part in ours.rows} == {"latent"} and all(rows.any(axis=2).all() for rows in ours.rows.values())
    assert {rows.shape[0] for rows in ours.rows.values()} == {1}
    assert {rows.shape[2] for rows in ours.rows.values()} == {4 * (LATENT + ROPE)}
