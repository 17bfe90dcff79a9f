"""Draw one picture with the transformer sharded over all ranks of torchrun.

On four GPUs, each holding a quarter of FLUX.2's transformer:

    torchrun --nproc-per-node 4 examples/tensor_parallel_flux2.py

On any machine, with the embedded model on two CPU processes:

    torchrun --nproc-per-node 2 examples/tensor_parallel_flux2.py --model embedded
"""

import argparse
import os
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from torch import distributed as dist

from shardwise import TensorParallelConfig, demo_model_path
from shardwise.demo import CALL
from shardwise.models import Flux2Transformer2DModel


def parse_args() -> argparse.Namespace:
    """Read the arguments; what is left out is chosen by what the machine has."""
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Tensor parallel FLUX.2")
    parser.add_argument(
        "--model", default="black-forest-labs/FLUX.2-dev", help="folder, hub id, or 'embedded'"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if has_gpu else "cpu")
    parser.add_argument("--backend", help="default: nccl on cuda, gloo on cpu")
    parser.add_argument("--prompt", default="a red circle beside a blue square on a white background")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", default="output.png")
    return parser.parse_args()


def main() -> None:
    """Be one rank: load this rank's slices, draw with the others; rank 0 writes the picture."""
    args = parse_args()
    dist.init_process_group(backend=args.backend or {"cuda": "nccl", "cpu": "gloo"}[args.device])
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}")  # torchrun: this process's GPU on its node
        torch.cuda.set_device(device)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    embedded = args.model == "embedded" or Path(args.model).resolve() == demo_model_path().resolve()
    model = demo_model_path() if embedded else args.model

    transformer = Flux2Transformer2DModel.from_pretrained(
        model,
        subfolder="transformer",
        dtype=dtype,
        parallel_config=TensorParallelConfig(tp_degree=world_size),
    )
    pipeline = DiffusionPipeline.from_pretrained(model, transformer=transformer, dtype=dtype)
    # The transformer is on its device already; move the rest one by one (never `pipeline.to(device)`).
    pipeline.text_encoder.to(device)
    pipeline.vae.to(device)

    generator = torch.Generator().manual_seed(args.seed)  # the same noise on every rank
    options = CALL if embedded else {}
    image = pipeline(prompt=args.prompt, generator=generator, **options).images[0]
    if rank == 0:
        image.save(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
