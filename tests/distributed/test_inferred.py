"""Plans that were inferred, on two ranks: equal to one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shardwise import TensorParallelConfig, enable_parallelism, infer
from tests import tolerances
from tests.helpers import outputs, relative_error, tiny_inputs, tiny_model
from tests.pool import Pool


def _inferred(name: str) -> float:
    whole, sharded, inputs = tiny_model(name), tiny_model(name), tiny_inputs(name)
    plan = infer(whole, dist.get_world_size(), inputs).plan
    config = TensorParallelConfig(tp_degree=dist.get_world_size(), check=False)
    enable_parallelism(sharded, config=config, plan=plan)
    return relative_error(outputs(sharded, inputs), outputs(whole, inputs))


@pytest.mark.parametrize(
    "name",
    [
        "Flux2Transformer2DModel",
        "LTXVideoTransformer3DModel",
        "QwenImageTransformer2DModel",  # with its modulations split, which the declared plan leaves whole
        "SD3Transformer2DModel",
        "WanTransformer3DModel",
    ],
)
def test_inferred_plan_equals_one_process(two_ranks: Pool, name: str) -> None:
    assert max(two_ranks.run(_inferred, name)) < tolerances.FP32
