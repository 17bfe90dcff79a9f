"""Faults of ranks, hosts and links on purpose: how soon everything ends, and what is said."""
