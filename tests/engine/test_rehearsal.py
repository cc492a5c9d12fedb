"""What is rehearsed at load runs for every kind of model that a kernel could serve."""

import mlx.core as mx
import pytest

from mlx_swarm.broker.cache import kinds
from mlx_swarm.broker.engine.batch_test import COMMON
from mlx_swarm.broker.engine.decode_batch import PrefillLimits
from mlx_swarm.broker.engine.rehearsal import rehearse
from mlx_swarm.broker.engine.self_test import self_test
from mlx_swarm.broker.engine.sharing import Piece
from tests.engine.test_shared import KINDS, model_of


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"mamba2", "lfm2"}))
def test_a_batch_lives_through_everything_once(kind: str) -> None:
    model = model_of(kind)
    assert self_test(model.model).passed
    caches = model.make_caches()
    logits = model.model(mx.array([COMMON]), cache=caches)
    layout = kinds.layout_of(caches)
    path = [Piece(kinds.seal(caches, layout, 0, len(COMMON)), 0, len(COMMON))]
    rehearse(model.model, layout, PrefillLimits(2048), path, logits.shape[-1])
