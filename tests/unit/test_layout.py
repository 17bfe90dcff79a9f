"""Slice arithmetic: each index belongs to one rank, and each rank has its share of every block."""

from itertools import accumulate

import pytest

from shardwise.plan.layout import Replicated, Shard, Span, divisors

CUTS = [
    pytest.param(Shard(0, (8,)), 1, id="one-rank"),
    pytest.param(Shard(0, (8,)), 2, id="plain"),
    pytest.param(Shard(1, (12, 12)), 4, id="equal-blocks"),
    pytest.param(Shard(0, (4, 12, 8)), 4, id="unequal-blocks"),
    pytest.param(Shard(2, (9, 3)), 3, id="three-ranks"),
    pytest.param(Shard(0, (0, 6)), 2, id="empty-block"),
    pytest.param(Shard(1, (30, 60), units=30), 4, id="30-heads"),
    pytest.param(Shard(0, (12, 6), units=6), 4, id="6-heads"),
]


def owned(shard: Shard, rank: int, degree: int) -> list[int]:
    return [i for span in shard.spans(rank, degree) for i in range(span.start, span.stop)]


@pytest.mark.parametrize(("shard", "degree"), CUTS)
def test_spans_give_each_index_to_one_rank(shard: Shard, degree: int) -> None:
    everything = [i for rank in range(degree) for i in owned(shard, rank, degree)]
    assert sorted(everything) == list(range(shard.size))


@pytest.mark.parametrize(("shard", "degree"), CUTS)
def test_E5_spans_cut_each_block_on_its_own(shard: Shard, degree: int) -> None:
    stops = list(accumulate(shard.blocks))
    for rank in range(degree):
        indices = owned(shard, rank, degree)
        for block, stop in zip(shard.blocks, stops, strict=True):
            heads = shard.units or degree  # the first ranks have one more than the last
            first, after = (
                sum(heads // degree + (r < heads % degree) for r in range(n)) for n in (rank, rank + 1)
            )
            start, piece = stop - block, block // heads
            inside = [i for i in indices if stop - block <= i < stop]
            assert inside == list(range(start + first * piece, start + after * piece))


@pytest.mark.parametrize(("shard", "degree"), CUTS)
def test_spans_ascend_and_come_one_for_each_block(shard: Shard, degree: int) -> None:
    for rank in range(degree):
        spans = shard.spans(rank, degree)
        assert len(spans) == len(shard.blocks)
        assert owned(shard, rank, degree) == sorted(owned(shard, rank, degree))


def test_spans_of_fused_blocks_are_not_those_of_their_sum() -> None:
    assert Shard(0, (4, 8)).spans(1, 2) == (Span(2, 2), Span(8, 4))
    assert Shard(0, (12,)).spans(1, 2) == (Span(6, 6),)


@pytest.mark.parametrize(("shard", "degree"), CUTS)
def test_local_shape_is_the_shape_of_the_spans(shard: Shard, degree: int) -> None:
    shape = [5, 6, 7]
    shape[shard.dim] = shard.size
    for rank in range(degree):
        local = list(shape)
        local[shard.dim] = len(owned(shard, rank, degree))
        assert shard.local_shape(tuple(shape), rank, degree) == tuple(local)


def test_dim_that_counts_from_the_end_is_no_layout() -> None:
    with pytest.raises(AssertionError):
        Shard(-1, (8,))


@pytest.mark.parametrize("shape", [(), (0,), (4, 6)])
def test_P10_replicated_keeps_the_whole_shape(shape: tuple[int, ...]) -> None:
    assert Replicated().local_shape(shape, 1, 4) == shape


@pytest.mark.parametrize(
    ("blocks", "degree", "positions"),
    [((8,), 4, ()), ((8,), 3, (0,)), ((2, 6), 4, (0, 1)), ((4, 6, 8), 4, (1,)), ((5, 7), 1, ())],
)
def test_E5_indivisible_names_the_blocks_even_where_their_sum_divides(
    blocks: tuple[int, ...], degree: int, positions: tuple[int, ...]
) -> None:
    assert Shard(0, blocks).indivisible(degree) == positions


@pytest.mark.parametrize(("number", "expected"), [(1, [1]), (12, [1, 2, 3, 4, 6, 12]), (7, [1, 7]), (0, [])])
def test_divisors_are_all_and_ascend(number: int, expected: list[int]) -> None:
    assert divisors(number) == expected


@pytest.mark.parametrize("copies", [2, 4])
def test_copies_give_the_same_piece_to_neighbouring_ranks(copies: int) -> None:
    shared, pieces = Shard(0, (8, 16), copies), 8 // copies
    for rank in range(8):
        assert owned(shared, rank, 8) == owned(Shard(0, (8, 16)), rank // copies, pieces)
    assert shared.local_shape((24, 5), 3, 8) == (24 // pieces, 5)


def test_30_heads_on_4_ranks_are_8_8_7_and_7() -> None:
    queries = Shard(0, (30 * 64,), units=30)
    assert [queries.local_size(rank, 4) // 64 for rank in range(4)] == [8, 8, 7, 7]
    assert queries.indivisible(4) == ()
    assert Shard(0, (70,), units=30).indivisible(4) == (0,)  # no whole number for each head
    assert Shard(0, (60,), units=3).indivisible(4) == (0,)  # nothing for the last rank


def test_pieces_in_copies_need_blocks_that_their_number_divides() -> None:
    assert Shard(0, (3, 6), 2).indivisible(4) == (0,)
    assert Shard(0, (2, 2), 2).pieces_are_single(4)
    assert not Shard(0, (2, 4), 2).pieces_are_single(4)


def test_layouts_print_as_reports_show_them() -> None:
    assert str(Replicated()) == "replicated"
    assert str(Shard(1, (8,))) == "shard(dim 1)"
    assert str(Shard(0, (4, 4, 8))) == "shard(dim 0, blocks 4+4+8)"
    assert str(Shard(0, (4, 4), 2)) == "shard(dim 0, blocks 4+4, 2 copies)"


def test_equal_layouts_are_one_key() -> None:
    assert {Shard(0, (4,)), Shard(0, (4,)), Replicated(), Replicated()} == {Shard(0, (4,)), Replicated()}
    assert Shard(0, (4, 4)) != Shard(0, (8,))
