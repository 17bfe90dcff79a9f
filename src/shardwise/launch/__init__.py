"""Ranks: processes that work together, of which none outlives the others or its launcher, ours or a cluster's."""

from shardwise.launch.found import found
from shardwise.launch.ranks import init_ranks, is_first, is_rank, own_share, run_as_rank, run_ranks

__all__ = ["found", "init_ranks", "is_first", "is_rank", "own_share", "run_as_rank", "run_ranks"]
