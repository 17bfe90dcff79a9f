"""The optional branches of the shipped families: two ranks against one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shardwise import TensorParallelConfig, enable_parallelism
from tests import tolerances
from tests.branches import BRANCHES, UNFOLLOWED
from tests.helpers import outputs, relative_error
from tests.pool import Pool


def _branch(name: str) -> float:
    branch = (BRANCHES | UNFOLLOWED)[name]
    whole, sharded = branch.model(), branch.model()
    # The numbers are the question here; `tests/unit/test_branches.py` runs the check.
    config = TensorParallelConfig(tp_degree=dist.get_world_size(), check=False)
    enable_parallelism(sharded, config=config, plan=branch.plan(sharded))
    inputs = branch.arguments(whole)
    return relative_error(outputs(sharded, inputs), outputs(whole, inputs))


@pytest.mark.parametrize("name", [*BRANCHES, *UNFOLLOWED])
def test_optional_branch_equals_one_process(two_ranks: Pool, name: str) -> None:
    assert max(two_ranks.run(_branch, name)) < tolerances.FP32
