"""SGLang's draft model: its real pools beside the model's, and the fields of its real metadata buffers."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvbridge_proto.pool import Shard

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not in this environment (make test-sglang)", allow_module_level=True)

from kvbridge.adapters.engine.memory import Memory
from kvbridge.adapters.sglang import metadata
from kvbridge.adapters.sglang.drafts import pools
from kvbridge.adapters.sglang.metadata import Metadata
from kvbridge.adapters.sglang.pool import describe, moved
from kvbridge.device.handles import export_all
from kvbridge.errors import OperatorError
from kvbridge.geometry.check import check_pool
from kvbridge.geometry.compat import Convertible, Incompatible, verdict
from kvbridge.geometry.overlap import overlaps
from kvbridge.models.config import read
from kvbridge.models.described import pools_of
from kvbridge.models.engine_command import parse
from testing.carried import OnCpu, move
from testing.oracle import fill, rows_at, take_rows
from tests.integration.adapters.small import held
from tests.integration.adapters.test_sglang_pool import (
    HEADS,
    LAYERS,
    TOKENS,
    WIDTH,
    drafting,
    latent,
    on_a_cpu,
    plain,
    pool_class,
    queue_of,
    sparse,
)
from tests.support.families import config, windows

pytestmark = pytest.mark.sglang
__all__ = ["on_a_cpu"]  # a fixture

PAGE, ROOM, HIDDEN, PLACE = 16, 7, 24, 1


def described(queue: Any, shard: Shard | None = None, draft: str = "") -> Memory:
    memory = describe(queue, shard or Shard(), model_name="m", engine_id="e", draft=draft)
    assert check_pool(memory.pool) == () == overlaps(memory.pool)
    return memory


def test_a_draft_s_layers_come_after_the_model_s_in_the_same_pages() -> None:
    """Two modules of one layer each, with other heads; SGLang numbers each from a number of its own."""
    first, second = (plain(heads=2, layer_num=1, start_layer=start) for start in (0, 5))
    memory = described(drafting(queue_of(plain()), first, second, heads=2))
    pool = memory.pool
    assert (pool.model.depth, pool.model.drafts, pool.model.draft) == (LAYERS, (LAYERS, LAYERS + 1), "eagle")
    assert [group.block_tokens for group in pool.groups] == [PAGE]
    assert {(plane.layer, plane.heads) for plane in pool.planes} == {
        *((layer, HEADS) for layer in range(LAYERS)),
        *((LAYERS + i, 2) for i in range(2)),
    }
    for i, own in enumerate((first, second)):
        for part, (buffer,) in (("k", own.k_buffer), ("v", own.v_buffer)):
            buffer.view(torch.uint8).random_(256)
            (plane,) = [each for each in pool.planes if (each.layer, each.part) == (LAYERS + i, part)]
            found = take_rows(held(memory), plane, np.arange(len(buffer)))
            assert np.array_equal(found, buffer.view(torch.uint8).numpy())


def test_the_index_keys_of_a_draft_come_with_its_latents() -> None:
    """DeepSeek V3.2's and GLM-5's MTP."""
    pool = described(drafting(queue_of(sparse()), sparse(layer_num=1), path="", algorithm="NEXTN")).pool
    parts = {layer: {plane.part for plane in pool.planes if plane.layer == layer} for layer in (0, LAYERS)}
    assert parts[0] == parts[LAYERS] and len(parts[0]) == 3 and pool.model.drafts == (LAYERS,)


def test_a_pool_that_modules_share_is_there_once() -> None:
    own = plain(layer_num=1)
    assert described(drafting(queue_of(plain()), own, own)).pool.model.drafts == (LAYERS,)


@pytest.mark.parametrize(
    ("path", "said", "name"),
    [("/models/eagle/", "", "eagle"), ("/models/llama", "", "m"), (None, "", "m"), ("/models/eagle", "ours", "ours")],
)
def test_a_draft_is_called_by_its_path_or_as_the_operator_says(path: str, said: str, name: str) -> None:
    """MTP has no path of its own, or the model's: it is the model's."""
    queue = drafting(queue_of(latent()), latent(layer_num=1), path=path, algorithm="NEXTN")
    assert described(queue, draft=said).pool.model.draft == name


def test_addresses_are_found_again_after_its_memory_has_moved_too() -> None:
    own = plain(layer_num=1)
    queue = drafting(queue_of(plain()), own)
    export_all(described(queue).storages)
    for pool in pools(queue):
        moved(pool)
    assert own.data_ptrs.tolist() == [buffer.data_ptr() for buffer in (*own.k_buffer, *own.v_buffer)]


def test_what_a_draft_cannot_be_is_refused_by_name() -> None:
    for queue, reason in (
        (drafting(queue_of(plain()), plain(layer_num=1), algorithm="DFLASH"), "--speculative-algorithm DFLASH: "),
        (drafting(queue_of(plain()), object.__new__(pool_class("SWAKVPool"))), "draft model's KV pool: SWAKVPool"),
        (drafting(queue_of(plain()), object.__new__(pool_class("QSATokenToKVPool"))), "KV pool: QSATokenToKVPool"),
        (drafting(queue_of(plain()), plain(32, layer_num=1)), "pages of 32 tokens, the model's 16"),
        (drafting(queue_of(plain()), plain(heads=3, layer_num=1)), "3 heads on rank 0 of 1, expected 4"),
    ):
        with pytest.raises(OperatorError) as caught:
            described(queue)
        assert reason in str(caught.value)


def test_a_plan_refuses_a_drafts_pool_with_the_adapters_words() -> None:
    queue = drafting(queue_of(plain()), object.__new__(pool_class("SWAKVPool")))
    own = {"sliding_window": 16, "layer_types": windows(2, 2), "num_nextn_predict_layers": 1}
    model = read(config("step3p5", 2, 4, 4, 8, **own))
    with pytest.raises(OperatorError) as ours:
        described(queue)
    with pytest.raises(OperatorError) as planned:
        pools_of(model, parse("sglang --speculative-algorithm EAGLE"), "m", "e")
    assert (planned.value.code, planned.value.reasons) == (ours.value.code, ours.value.reasons)


def test_a_draft_of_another_model_is_refused_by_name() -> None:
    ours = described(drafting(queue_of(plain()), plain(layer_num=1))).pool
    other = described(drafting(queue_of(plain()), plain(layer_num=1), path="/models/eagle3")).pool
    wide = described(drafting(queue_of(plain()), plain(layer_num=1, head_dim=2 * WIDTH))).pool
    for sender, reason in ((other, "draft: sender eagle3, receiver eagle"), (wide, "key_width: sender 16, receiver 8")):
        found = verdict(sender, ours)
        assert isinstance(found, Incompatible) and found.reasons[0].startswith(reason)


@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (0, 1), (1, 0), (1, 2)])
def test_rows_are_carried_and_zeros_fill_what_the_prefill_side_lacks(ours: int, theirs: int) -> None:
    """From pages of 16 to a page of 64. The other page stays as it was: NaN, here."""
    sender, receiver = (
        described(drafting(queue_of(plain(page)), *(plain(page, layer_num=1) for _ in range(count))))
        if count
        else described(queue_of(plain(page)))
        for page, count in ((PAGE, ours), (TOKENS, theirs))
    )
    ends = held(sender), held(receiver)
    fill(ends[0], [1, 3, 2], range(40))
    for region in ends[1].memory:
        region[:] = 0xFF
    before = ends[1].copy()
    move([ends[0]], [1, 3, 2], ends[1], [1], range(40), 1 << 14, OnCpu())
    found = verdict(sender.pool, receiver.pool)
    assert isinstance(found, Convertible)
    said = [change for change in found.changes if change.startswith("layers: ")]
    assert (
        said
        == {
            1: [f"layers: sender {LAYERS + ours}, receiver {LAYERS + theirs} and fills {theirs - ours} with zeros"],
            0: [],
            -1: [f"layers: sender {LAYERS + ours}, receiver {LAYERS + theirs} and takes its own"],
        }[theirs - ours]
    )
    for plane in receiver.pool.planes:
        _, places = rows_at(receiver.pool, 0, [1], range(40))
        rows = take_rows(ends[1], plane, places)
        if plane.layer < LAYERS + ours:
            (source,) = [each for each in sender.pool.planes if (each.layer, each.part) == (plane.layer, plane.part)]
            _, given = rows_at(sender.pool, 0, [1, 3, 2], range(40))
            assert np.array_equal(rows, take_rows(ends[0], source, given))
        else:
            assert not rows.any()
        others = np.arange(TOKENS)
        assert np.array_equal(take_rows(ends[1], plane, others), take_rows(before, plane, others))


# The metadata buffer:


def buffers(hidden: int, dtype: torch.dtype, seed: int = 0) -> Any:
    """SGLang's own, with room for three requests. Every byte is a 9: what an earlier request left."""
    from sglang.srt.disaggregation.utils import MetadataBuffers

    made = MetadataBuffers(3, hidden, dtype, 16, output_dsa_topk_indices_dim=seed)
    for tensor in vars(made).values():
        if isinstance(tensor, torch.Tensor):
            tensor.view(torch.uint8).fill_(9)
    return made


def drafted(hidden: int = HIDDEN, seed: int = 0) -> Any:
    made = buffers(hidden, torch.bfloat16, seed)
    made.output_topk_p[PLACE][:2] = torch.tensor([0.75, 0.25])
    made.output_topk_index[PLACE][:2] = torch.tensor([5, 7])
    made.output_hidden_states[PLACE] = torch.arange(hidden)
    return made


def undrafted(seed: int = 0) -> Any:
    """As SGLang makes them without drafts: of a hidden state of 16, and never written."""
    made = buffers(16, torch.float32, seed)
    for tensor in (made.output_topk_p, made.output_topk_index, made.output_hidden_states):
        tensor[PLACE].zero_()
    return made


def args_of(made: Any) -> Any:
    pointers, _, sizes = made.get_buf_infos()
    return SimpleNamespace(aux_data_ptrs=pointers, aux_item_lens=sizes)


def told_by(made: Any) -> Metadata:
    return metadata.read(args_of(made), PLACE, ROOM, "ab")


def taken(said: Metadata, ours: Any) -> str:
    return metadata.take(said, args_of(ours), ours, PLACE)


def is_unknown(made: Any) -> bool:
    """Nobody has drafted: nothing is likely, and no token is there twice. Other requests' rows are as they were."""
    mine = made.output_topk_p[PLACE], made.output_hidden_states[PLACE]
    others = [each for each in (0, 2) if not (made.output_topk_p[each].view(torch.uint8) == 9).all()]
    seed = made.output_dsa_topk_indices is None or bool((made.output_dsa_topk_indices[PLACE] == -1).all())
    distinct = made.output_topk_index[PLACE].tolist() == list(range(16))
    return not others and seed and distinct and not any(each.any() for each in mine)


def test_drafts_of_the_prefill_side_come_with_the_first_token() -> None:
    theirs, ours = drafted(), buffers(HIDDEN, torch.bfloat16)
    theirs.output_ids[PLACE][0] = 42
    assert taken(told_by(theirs), ours) == ""
    assert ours.output_ids[PLACE][0] == 42
    for name in ("output_topk_p", "output_topk_index", "output_hidden_states"):
        assert torch.equal(getattr(ours, name)[PLACE], getattr(theirs, name)[PLACE])


@pytest.mark.parametrize("seed", [0, 8])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (undrafted, drafted),  # only the decode side drafts
        (drafted, undrafted),  # only the prefill side does
        (undrafted, undrafted),
        (lambda seed: drafted(2 * HIDDEN, seed), drafted),  # drafts of another model: refused by its rows, too
        (lambda seed: undrafted(seed), lambda seed: buffers(32, torch.bfloat16, seed)),  # as many bytes, by chance
    ],
)
def test_without_drafts_of_a_model_like_ours_none_are_known(theirs: Any, ours: Any, seed: int) -> None:
    made = ours(seed=seed)
    made.output_topk_p[PLACE].fill_(0.5)  # an earlier request's
    sent = theirs(seed=seed)
    sent.output_ids[PLACE][0] = 42
    assert taken(told_by(sent), made) == ""
    assert made.output_ids[PLACE][0] == 42 and is_unknown(made)


def test_a_metadata_buffer_that_differs_elsewhere_is_refused() -> None:
    said = told_by(drafted())
    for fields in ((b"1", *said.fields[1:]), said.fields[1:]):
        reason = taken(Metadata(ROOM, "ab", fields), drafted())
        assert reason.startswith("metadata buffer: bytes of its fields: prefill [")


def test_another_engine_s_prefill_has_drafted_nothing() -> None:
    made = drafted(seed=8)
    metadata.write(made, PLACE, ROOM, 5, None, [])
    assert is_unknown(made) and made.output_ids[PLACE][0] == 5
