"""Two roots of one episode are two texts, whether or not the engine stores their prompts once."""

from __future__ import annotations

import pytest
import torch

from octopus_trl import Engine, prepare_model, score_traces
from octopus_trl.trace import Segment, ThreadRecord, Trace
from tests.tiny import tiny_dense, tiny_hybrid

PROMPT = [5, 6, 7, 8, 9]


@pytest.mark.parametrize("other", [PROMPT, [5, 6, 1, 2, 3], [1, 2, 3, 4, 5]])
@pytest.mark.parametrize("hybrid", [True, False])
def test_a_root_that_mounts_another_sees_all_of_it(hybrid: bool, other: list[int]) -> None:
    model = tiny_hybrid(seed=0) if hybrid else tiny_dense(seed=0)
    prepare_model(model, mount_layers="attention" if hybrid else [1, 2])
    engine = Engine(model, page_size=4, num_pages=64, num_states=32)
    reader, source = engine.open(PROMPT), engine.open(other)
    engine.mount(reader, source)
    assert reader.position == len(other)
    got = torch.log_softmax(engine.logits(engine.extend(reader, [11, 12])), -1)
    trace = Trace(
        "e",
        "p",
        segments=[
            Segment(0, 0, None, "prompt", PROMPT),
            Segment(1, 1, None, "prompt", other),
            Segment(2, 0, 0, "tool", [11, 12], [1]),
            Segment(3, 0, 2, "tool", [13]),
        ],
        threads=[ThreadRecord(0, None, head=3), ThreadRecord(1, None, head=1)],
    ).place()
    with torch.no_grad():
        want = score_traces(model, [trace])[0][3][0]
    assert abs(float(got[13] - want)) <= 1e-5
    engine.mount(reader, source)
    assert reader.position == len(other) + 2, "nothing new the second time"
    engine.check_integrity()
