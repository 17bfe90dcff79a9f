"""Draws the pictures of the README: the demo's sheet, and the same prompts under a wrong plan that nothing notices.

The wrong plan cuts the fused projections in plain parts, as if each were one matrix. Every shape fits and no
library raises. shardwise finds such a plan before it reads a weight, so its check is turned off, and the blocks
that the model declares are taken away.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline
from PIL import Image

from shardwise import TensorParallelConfig, demo_model_path, enable_parallelism
from shardwise.demo.run import PROMPTS, Drawn, draw, draw_sharded
from shardwise.demo.sheet import contact_sheet
from shardwise.launch import run_ranks
from shardwise.models.families.flux2 import PLAN

PLAIN_PLAN = PLAN | {
    "transformer_blocks.*.ff.linear_in": "colwise",
    "transformer_blocks.*.ff_context.linear_in": "colwise",
    "single_transformer_blocks.*.attn.to_qkv_mlp_proj": "colwise",
    "single_transformer_blocks.*.attn.to_out": "rowwise",
}


def draw_with_plain_parts() -> Drawn:
    """Draw the demo's prompts on the ranks of the process group under the wrong plan."""
    pipeline: Any = DiffusionPipeline.from_pretrained(demo_model_path(), dtype=torch.float32)
    for block in pipeline.transformer.single_transformer_blocks:
        del block.attn.to_qkv_mlp_proj._tp_packed_col_blocks, block.attn.to_out._tp_packed_row_blocks
    config = TensorParallelConfig(tp_degree=dist.get_world_size(), check=False)
    enable_parallelism(pipeline.transformer, config=config, plan=PLAIN_PLAN)
    return draw(pipeline)


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/images"), show_default=True)
def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, (drawn, *_) in {
        "sheet.png": run_ranks(draw_sharded, 2, 2),
        "sheet-wrong-plan.png": run_ranks(draw_with_plain_parts, 2),
    }.items():
        pictures = [Image.fromarray((pixels * 255).round().astype("uint8")) for pixels in drawn.pixels]
        contact_sheet(pictures, PROMPTS).quantize(128).save(out / name, optimize=True)


if __name__ == "__main__":
    main()
