"""What a rank raises when some rank has failed: a checkpoint's error alike everywhere, others with who failed."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._C._distributed_c10d import FileStore

from shardwise.errors import (
    CheckpointError,
    GroupError,
    PlanError,
    RankFailure,
    ShardwiseError,
    UnsupportedOption,
)
from shardwise.runtime.agreement import Words, compare_claims, raise_failure
from shardwise.runtime.group import TensorParallelGroup


def raised(
    failures: list[tuple[str, str] | None], error: BaseException | None = None
) -> BaseException | None:
    try:
        raise_failure("loading", [list(failure) if failure else None for failure in failures], error)
    except BaseException as caught:
        return caught
    return None


def test_nothing_is_raised_if_no_rank_has_failed() -> None:
    assert raised([None, None]) is None


@pytest.mark.parametrize("kind", [CheckpointError, UnsupportedOption])
def test_error_of_a_file_is_raised_in_the_same_words_on_the_rank_that_has_it_and_on_others(
    kind: type[ShardwiseError],
) -> None:
    failures = [None, (kind.__name__, "x is broken"), None]
    theirs, own = raised(failures), raised(failures, kind("x is broken"))
    assert type(theirs) is type(own) is kind
    assert str(theirs) == str(own) == "x is broken\n  on rank 1 of 3"


def test_error_that_all_ranks_have_is_their_own() -> None:
    error = CheckpointError("x is broken")
    assert raised([("CheckpointError", "x is broken")] * 2, error) is error


def test_of_several_files_that_are_broken_the_first_rank_s_is_named_on_all() -> None:
    failures = [("CheckpointError", "x is broken"), ("UnsupportedOption", "y is pickled")]
    errors = [
        raised(failures, CheckpointError("x is broken")),
        raised(failures, UnsupportedOption("y is pickled")),
    ]
    assert {type(error) for error in errors} == {CheckpointError}
    assert {str(error) for error in errors} == {"x is broken\n  on ranks 0, 1 of 2"}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("full"), PlanError([])])
def test_other_error_is_raised_where_it_is_and_named_on_the_other_ranks(error: BaseException) -> None:
    failures = [None, (type(error).__name__, "why")]
    assert raised(failures, error) is error
    other = raised(failures)
    assert type(other) is RankFailure
    assert str(other) == f"loading failed on rank 1 of 2: {type(error).__name__}: why"


def test_rank_that_is_interrupted_while_another_meets_a_broken_file_stays_interrupted() -> None:
    error = KeyboardInterrupt()
    assert raised([("CheckpointError", "x"), ("KeyboardInterrupt", "")], error) is error


@pytest.mark.parametrize("claims", [[{"a": "1"}, {"a": "2"}], [{}, {"a": "2"}], [{"a": "1"}, {}]])
def test_claim_that_differs_or_is_missing_is_named_with_each_rank_s(claims: list[dict[str, str]]) -> None:
    with pytest.raises(
        RankFailure, match=r"loading: the ranks differ in a\n  rank 0: (1|nothing)\n  rank 1: "
    ):
        compare_claims("loading", claims)
    compare_claims("loading", [claims[0], claims[0]])


# --- what is left of a process group that is gone -----------------------------------------------------------------


def test_second_group_hears_nothing_of_the_first_whose_words_are_still_in_the_store(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    before, after = ([Words(store, rank) for rank in range(2)] for _ in range(2))
    before[1].store.post(f"{before[1].next_turn()}/1", "a word of the first group")
    turn = after[0].next_turn()
    with pytest.raises(TimeoutError):
        after[0].store.read(f"{turn}/1", timedelta(milliseconds=50))
    assert before[0].store.read(f"{turn}/1", timedelta(seconds=1))  # the control: it is there
    after[1].store.post(f"{turn}/1", "of the second")
    assert after[0].store.read(f"{turn}/1", timedelta(seconds=1)) == "of the second"


# --- devices that ranks call by the same name -----------------------------------------------------------------------


def placed(monkeypatch: pytest.MonkeyPatch, uuids: list[str]) -> tuple[int, ...]:
    """Return what rank 0 hears of where it is, where all ranks of one machine see one device each."""
    group = TensorParallelGroup.__new__(TensorParallelGroup)
    group.rank, group.degree, group.device = 0, len(uuids), torch.device("cuda:0")
    properties = mock.Mock(uuid=uuids[0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr("shardwise.runtime.group.may_share", lambda device, process_group: False)
    group.process_group = mock.Mock()
    heard = [[group.node, uuid, "cuda:0"] for uuid in uuids]
    monkeypatch.setattr(group, "exchange", lambda own: heard if own == heard[0] else None)
    return group.meet()


def test_ranks_that_each_see_another_device_as_the_first_are_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert placed(monkeypatch, ["GPU-a", "GPU-b"]) == (0, 1)


def test_ranks_that_use_one_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GroupError, match="ranks 0 and 1 both use cuda:0"):
        placed(monkeypatch, ["GPU-a", "GPU-a"])
