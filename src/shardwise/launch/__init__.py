"""Ranks on this machine: N processes that work together, of which none outlives the others or the launcher."""

from shardwise.launch.ranks import is_rank, run_as_rank, run_ranks

__all__ = ["is_rank", "run_as_rank", "run_ranks"]
