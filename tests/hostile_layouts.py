"""Layouts and manifests of sharded checkpoints that must not be believed: each with what its refusal says."""

from __future__ import annotations

import json
from typing import Any

GOOD: dict[str, Any] = {"shape": [8, 3], "dim": 0, "blocks": [4, 4], "copies": 1, "units": 0}
"""The layout of a tensor of which rank 1 of 2 has 4 rows of 3."""


def said(layout: object = GOOD, **changes: object) -> str:
    content = {"version": 1, "rank": 1, "tp_degree": 2, "layouts": {"a": layout}}
    return json.dumps({k: v for k, v in {**content, **changes}.items() if v != "left out"})


def but(**changes: object) -> str:
    return said({**GOOD, **changes})


LAYOUTS: dict[str, tuple[str, str]] = {
    "no_json": ("no", "invalid JSON"),
    "list": ("[]", "not an object"),
    "name_twice": ('{"version": 1, "version": 1}', "given twice"),
    "other_version": (said(version=2), "of version 2"),
    "no_version": (said(version="left out"), "of version None"),
    "no_rank": (said(rank="left out"), "must have layouts, rank"),
    "more_fields": (said(extra=1), "nothing else"),
    "rank_too_large": (said(rank=2), "rank must be a number from 0 to 1"),
    "rank_text": (said(rank="1"), "rank must be a number"),
    "rank_true": (said(rank=True), "rank must be a number"),
    "no_degree": (said(tp_degree=0), "tp_degree must be a number"),
    "huge_degree": (said(tp_degree=10**9), "tp_degree must be a number"),
    "fraction": (said(tp_degree=2.0), "tp_degree must be a number"),
    "layouts_list": (said(layouts=[]), "its layouts must be an object"),
    "unknown_tensor": (said(layouts={"b": GOOD}), "a layout of 'b' and no such tensor"),
    "layout_list": (said([1]), "the layout of a must have"),
    "layout_without_units": (said({k: v for k, v in GOOD.items() if k != "units"}), "must have"),
    "layout_with_more": (but(more=1), "nothing else"),
    "negative_dim": (but(dim=-1), "dim of a must be a number from 0 to 1"),
    "dim_too_large": (but(dim=2), "dim of a must be a number from 0 to 1"),
    "dim_of_a_scalar": (but(shape=[]), "dim of a must be a number"),
    "shape_text": (but(shape="8x3"), "shape of a must be a list"),
    "shape_with_text": (but(shape=["8", 3]), "shape of a must be a number"),
    "huge_shape": (but(shape=[2**70, 3]), "shape of a must be a number"),
    "no_blocks": (but(blocks=[]), "the blocks of a sum to 0"),
    "no_blocks_of_nothing": (but(shape=[0, 3], blocks=[]), "the blocks of a sum to 0, and its dim 0 has 0"),
    "zero_block": (but(blocks=[8, 0]), "blocks of a must be a number from 1"),
    "blocks_too_short": (but(blocks=[4, 2]), "the blocks of a sum to 6, and its dim 0 has 8"),
    "many_blocks": (but(blocks=[1] * 70000), "blocks of a must be a list"),
    "odd_blocks": (but(blocks=[5, 3]), "cannot be cut for 2 ranks"),
    "copies_zero": (but(copies=0), "copies of a must be a number from 1 to 2"),
    "copies_too_many": (but(copies=3), "copies of a must be a number from 1 to 2"),
    "copies_that_do_not_divide": (
        said({**GOOD, "copies": 2}, tp_degree=3),
        "cannot have 2 copies on 3 ranks",
    ),
    "copies_and_units": (but(copies=2, units=4), "cannot have 2 copies on 2 ranks, and 4 units"),
    "negative_units": (but(units=-1), "units of a must be a number"),
    "huge_units": (but(units=10**12), "units of a must be a number from 0 to 4"),
    "fewer_units_than_ranks": (but(units=1), "cannot be cut for 2 ranks"),
    "units_that_do_not_divide": (but(units=3), "cannot be cut for 2 ranks"),
    "other_piece": (
        but(shape=[16, 3], blocks=[8, 8]),
        "a is [4, 3], and by its layout rank 1 of 2 has [8, 3]",
    ),
    "other_width": (but(shape=[8, 4]), "a is [4, 3], and by its layout"),
    "more_dims": (but(shape=[8, 3, 1]), "a is [4, 3], and by its layout"),
    "deep": ('{"a":' * 100_000, "nested too deeply"),
}

NAMES = ["a.safetensors", "b.safetensors"]
MANIFESTS: dict[str, tuple[object, str]] = {
    "list": ([], "not an object"),
    "version": ({"version": 9, "tp_degree": 2, "files": NAMES}, "of version 9"),
    "fields": ({"version": 1, "files": NAMES}, "must have files"),
    "degree": ({"version": 1, "tp_degree": 3, "files": NAMES}, "must name 3 files"),
    "degree_text": ({"version": 1, "tp_degree": "2", "files": NAMES}, "tp_degree must be"),
    "files_text": ({"version": 1, "tp_degree": 2, "files": "ab"}, "must name 2 files"),
    "twice": ({"version": 1, "tp_degree": 2, "files": NAMES[:1] * 2}, "names a file twice"),
    "path": ({"version": 1, "tp_degree": 2, "files": ["../a.safetensors", NAMES[1]]}, "beside the manifest"),
    "number": ({"version": 1, "tp_degree": 2, "files": [1, NAMES[1]]}, "beside the manifest"),
    "pickle": ({"version": 1, "tp_degree": 2, "files": ["a.bin", NAMES[1]]}, "must be safetensors"),
}
