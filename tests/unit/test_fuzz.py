"""Generated files and indexes: nothing is accepted that safetensors refuses, and what is accepted is read alike.

`make fuzz` runs ten times as many, and its record is docs/fuzz.json.
"""

from __future__ import annotations

import json
import random
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tools.fuzz.__main__ import tally
from tools.fuzz.inputs import BITS, broken_file, broken_index, valid_file, valid_index
from tools.fuzz.verdicts import STRICTER, Disagreement, judge_file, judge_index

from shardwise.checkpoint import header, untrusted, weight_map
from shardwise.checkpoint.index import DTYPES, read_header
from tests.hostile import HEADERS, INDEXES, Hostile, packed
from tests.leaving_out import left_out, put

RECORD = Path(__file__).parents[2] / "docs" / "fuzz.json"
EXAMPLES = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


# ---------------------------------------------------------------- by the hundred thousand


@pytest.mark.parametrize("seed", range(5))
def test_verdicts_on_20000_broken_files_are_those_of_safetensors(seed: int) -> None:
    outcomes = tally(broken_file, judge_file, 20_000, seed)
    assert outcomes["both accept"] > 500  # the changes are small enough to leave some files right
    assert outcomes["both refuse"] > 10_000
    assert outcomes.total() == 20_000


def test_verdicts_on_20000_broken_indexes_hold() -> None:
    outcomes = tally(broken_index, judge_index, 20_000, 0)
    assert min(outcomes["accepted"], outcomes["refused"]) > 2000


def test_files_that_are_right_are_accepted() -> None:
    outcomes = tally(valid_file, judge_file, 2000, 0)
    packed = "refused here only: " + STRICTER["numbers share bytes"]
    assert outcomes.keys() == {"both accept", packed}
    assert outcomes["both accept"] > 1000


def test_indexes_that_are_right_are_accepted() -> None:
    assert tally(valid_index, judge_index, 2000, 0) == {"accepted": 2000}


def test_inputs_depend_on_their_number_only() -> None:
    first, again = ([broken_file(random.Random(n)) for n in range(300)] for _ in range(2))
    assert first == again


@pytest.mark.parametrize("hostile", HEADERS, ids=lambda hostile: hostile.name)
def test_judge_knows_why_each_hostile_file_is_refused(hostile: Hostile) -> None:
    assert judge_file(hostile.content).startswith(
        "refused here only: " if hostile.accepted_elsewhere else "both refuse"
    )


@pytest.mark.parametrize("hostile", INDEXES, ids=lambda hostile: hostile.name)
def test_judge_sees_hostile_indexes_refused(hostile: Hostile) -> None:
    assert judge_index(hostile.content) == "refused"


def test_record_of_a_longer_run_is_of_what_this_run_does() -> None:
    record = json.loads(RECORD.read_text("utf-8"))
    assert sum(record["files"].values()) >= 10**6
    assert record["disagreements"] == 0
    reasons = {outcome.partition(": ")[2] for outcome in record["files"]} - {""}
    assert reasons <= set(STRICTER.values())


# ---------------------------------------------------------------- negative controls

FOUND = {
    header: [
        "if length > size - 8",
        "if not isinstance(metadata, dict) or not all((isinstance(value, str) for value in metadata.values()))",
        "if prod((max(number, 1) for number in shape)) > _MAX_COUNT",
        "if len(offsets) != 2",
        "if end - begin != needed",
        "if entry.offset < end",
        "if entry.offset > end",
        "if end > size",
        "if end < size",
        "part value.keys() != _FIELDS",
        "part code not in _KNOWN_DTYPES",
        "part any((type(number) is not int for number in value))",
    ],
    untrusted: [
        "except RecursionError",
        "except ValueError",
        "if name in result",
        "call (name + value if isinstance(value, str) else name).encode()",
        "hook object_pairs_hook",
        "hook parse_int",
        "part text.isdigit()",
    ],
}


@pytest.mark.parametrize(
    ("module", "what"),
    [pytest.param(module, what, id=what) for module, whats in FOUND.items() for what in whats],
)
def test_check_that_is_left_out_is_found_by_chance(
    monkeypatch: pytest.MonkeyPatch, module: Any, what: str
) -> None:
    put(monkeypatch, module, left_out(module)[what])
    with pytest.raises(Disagreement):
        tally(broken_file, judge_file, 20_000, 0)


def test_path_that_is_no_longer_refused_is_found_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, weight_map, left_out(weight_map)["part not set('/\\\\:') & set(name)"])
    with pytest.raises(Disagreement, match="is taken for a file name"):
        tally(broken_index, judge_index, 20_000, 0)


# ---------------------------------------------------------------- by hypothesis

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
near_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(list(BITS)) | json_values,
        "shape": st.lists(st.integers(0, 4), max_size=4) | json_values,
        "data_offsets": st.lists(st.integers(-1, 64), min_size=2, max_size=2) | json_values,
    }
)


@st.composite
def valid_tensors(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a header whose tensors are one behind the other, in any order of names."""
    tensors: dict[str, Any] = {}
    end = 0
    for name in draw(
        st.lists(st.text(max_size=8).filter(lambda n: n != "__metadata__"), unique=True, max_size=5)
    ):
        dtype = draw(st.sampled_from(list(DTYPES)))
        shape = draw(st.lists(st.integers(0, 5), max_size=4))
        begin, end = end, end + prod(shape) * BITS[dtype] // 8
        tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return dict(draw(st.permutations(list(tensors.items()))))


@EXAMPLES
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_have_a_verdict(content: bytes, length: bool) -> None:
    judge_file(packed(content) if length else content)
    judge_index(content)


@EXAMPLES
@given(st.dictionaries(st.text(max_size=4), near_entries | json_values, max_size=3), st.integers(0, 80))
def test_any_json_has_a_verdict(values: dict[str, Any], size: int) -> None:
    judge_file(packed(values, size))
    judge_index(json.dumps({"weight_map": values}).encode())


@EXAMPLES
@given(valid_tensors(), st.data())
def test_one_byte_of_a_right_file_changed_has_the_verdict_of_safetensors(
    tensors: dict[str, Any], data: st.DataObject
) -> None:
    content = bytearray(packed(tensors, max((t["data_offsets"][1] for t in tensors.values()), default=0)))
    judge_file(bytes(content))
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    judge_file(bytes(content))


@EXAMPLES
@given(valid_tensors(), st.randoms(use_true_random=False))
def test_what_is_accepted_are_the_numbers_that_safetensors_gives(
    tmp_path: Path, tensors: dict[str, Any], rng: random.Random
) -> None:
    size = max((t["data_offsets"][1] for t in tensors.values()), default=0)
    content = packed(tensors, rng.randbytes(size))
    if judge_file(content) != "both accept":
        return
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    entries = read_header(file)
    with safe_open(file, "pt") as reference:
        assert entries.keys() == set(reference.keys())
        for name, entry in entries.items():
            theirs = reference.get_tensor(name)
            assert (theirs.dtype, tuple(theirs.shape)) == (entry.dtype, entry.shape)
            ours = content[entry.offset : entry.offset + entry.nbytes]
            assert bytes(theirs.reshape(-1).view(torch.uint8).numpy()) == ours
