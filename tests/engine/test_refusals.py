"""Whatever is wrong is refused by a typed error, and the pools are as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from octopus_trl.engine import Cursor, Engine
from octopus_trl.engine.checks import check_kernels
from octopus_trl.errors import ClosedCursor, ConfigError, OctopusError, StaleVersion
from octopus_trl.protocols import SamplingParams
from tests.engine.conftest import small_engine, tokens
from tests.engine.test_sizes import QWEN_4B

Call = Callable[[Engine, Cursor, Cursor, Cursor], object]
ONE = SamplingParams(max_tokens=1)

REFUSED: list[tuple[type[OctopusError], Call]] = [
    # lengths
    (ConfigError, lambda e, c, old, shut: e.rewind(c, True)),
    (ConfigError, lambda e, c, old, shut: e.rewind(c, 10)),
    (ConfigError, lambda e, c, old, shut: e.rewind(c, "3")),  # type: ignore[arg-type]
    (ConfigError, lambda e, c, old, shut: e.rewind(c, None)),  # type: ignore[arg-type]
    # settings of a turn
    (ConfigError, lambda e, c, old, shut: e.submit(c, [], None, until=())),  # type: ignore[arg-type]
    (ConfigError, lambda e, c, old, shut: e.submit(c, [], ONE, until=5)),  # type: ignore[arg-type]
    (ConfigError, lambda e, c, old, shut: e.submit(c, [], ONE, until=["a"])),  # type: ignore[list-item]
    (ConfigError, lambda e, c, old, shut: e.generate([c], [None], until=())),  # type: ignore[list-item]
    (ConfigError, lambda e, c, old, shut: e.generate([e.fork(c), c], [ONE, 3], until=())),  # type: ignore[list-item]
    (ConfigError, lambda e, c, old, shut: e.generate([c], None, until=())),  # type: ignore[arg-type]
    (ConfigError, lambda e, c, old, shut: e.generate(c, ONE, until=())),  # type: ignore[arg-type]
    (ConfigError, lambda e, c, old, shut: e.generate(None, ONE, until=())),  # type: ignore[arg-type]
    (ConfigError, lambda e, c, old, shut: e.cancel("1")),  # type: ignore[arg-type]
    # versions
    (ConfigError, lambda e, c, old, shut: e.set_policy_version(0)),
    (ConfigError, lambda e, c, old, shut: e.set_policy_version(True)),
    (ConfigError, lambda e, c, old, shut: e.set_policy_version(2.0)),  # type: ignore[arg-type]
    (StaleVersion, lambda e, c, old, shut: e.fork(old)),
    (StaleVersion, lambda e, c, old, shut: e.mount(c, old)),
    (StaleVersion, lambda e, c, old, shut: e.mount(c, c, since=old)),
    (StaleVersion, lambda e, c, old, shut: e.generate([c, old], ONE, until=())),
    # use after close
    (ClosedCursor, lambda e, c, old, shut: e.fork(shut)),
    (ClosedCursor, lambda e, c, old, shut: e.extend(shut, [1])),
    (ClosedCursor, lambda e, c, old, shut: e.mount(c, shut)),
    (ClosedCursor, lambda e, c, old, shut: e.mount(c, c, since=shut)),
    (ClosedCursor, lambda e, c, old, shut: e.rewind(shut, 1)),
    (ClosedCursor, lambda e, c, old, shut: e.logits(shut)),
    (ClosedCursor, lambda e, c, old, shut: e.generate([c, shut], ONE, until=())),
]


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_a_refused_call_changes_nothing(model: Any, index: int) -> None:
    error, call = REFUSED[index]
    engine = small_engine(model)
    old = engine.open(tokens(6))
    engine.set_policy_version(1)
    cursor, shut = engine.open(tokens(9)), engine.open(tokens(5, 1))
    engine.close(shut)
    before, logits = engine.stats(), engine.logits(cursor)
    with pytest.raises(error):
        call(engine, cursor, old, shut)
    engine.check_integrity()
    after = engine.stats()
    for name in ("pages", "slots", "prefilled", "decoded", "context_tokens", "mounts", "rewinds"):
        assert after[name] == before[name], name
    assert not engine.has_work
    assert (cursor.num_tokens, cursor.position) == (9, 9)
    assert torch.equal(engine.logits(cursor), logits)
    engine.generate([cursor], ONE, until=())


@pytest.mark.parametrize(
    ("head_dim", "heads", "words"),
    [(257, 16, "head_dim is 257, must be at most 256"), (512, 16, "head_dim"), (64, 1024, "heads")],
)
def test_shapes_that_the_decode_kernel_does_not_serve_are_refused_on_cuda_alone(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, heads: int, words: str
) -> None:
    monkeypatch.setenv("OCTOPUS_KERNELS", "auto")
    fields = {name: getattr(QWEN_4B, name) for name in QWEN_4B.__dataclass_fields__}
    spec = type(QWEN_4B)(**{**fields, "head_dim": head_dim, "num_heads": heads})
    cuda = torch.device("cuda")
    with pytest.raises(ConfigError, match=words):
        check_kernels(spec, cuda)
    check_kernels(spec, torch.device("cpu"))
    check_kernels(QWEN_4B, cuda)
    monkeypatch.setenv("OCTOPUS_KERNELS", "maths")
    check_kernels(spec, cuda)
