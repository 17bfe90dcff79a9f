"""The call `verify`: what is to be verified, the ranks that do it, and what they bring back."""

from __future__ import annotations

import copy
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import models
from shardwise.config import TensorParallelConfig
from shardwise.errors import ConfigError, RankFailure, ShardwiseError
from shardwise.launch import run_ranks
from shardwise.models.lookup import example_inputs, family_of, model_class
from shardwise.models.parallelism import enable_parallelism
from shardwise.plan.resolve import Plan
from shardwise.runtime.group import TensorParallelGroup, is_initialized
from shardwise.verification.bound import HALF
from shardwise.verification.checkpoint import Checkpoint, compare_by_block
from shardwise.verification.compare import Call, Trio, compare, worst
from shardwise.verification.report import ModuleError, VerifyReport

Inputs = Mapping[str, Any] | Sequence[Any] | Tensor


def verify(
    model: Any,
    degree: int = 2,
    inputs: Inputs | None = None,
    plan: Plan | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    subfolder: str | None = None,
    seed: int = 0,
    uneven: bool = False,
) -> VerifyReport:
    """Compare a model on `degree` ranks with one process, module by module, and return what differs.

    Each module whose inputs and outputs are whole on every rank is called with the input that it has in one
    process, on all ranks, so that its error is its own. Where a module contains another that diverges,
    the inner one comes first in the report. An error is rounding up to

        4 * eps(dtype) * (sqrt(products) + degree)

    of the largest value of the output, `products` being the input sizes of the module's weights added up. bfloat16
    and float16 are judged beside fp32 with the same weights: the ranks may be 1.5 times as far from it
    as one process is, plus `eps * sqrt(degree)`.

    Where a process group is running, every rank calls this, with the same model and inputs; otherwise the ranks are
    started here (call it below `if __name__ == "__main__":` then), or those that torchrun, Slurm or Kubernetes started.

    Args:
        model: One of

            - a model in memory, with its `inputs`. Without ranks running it must be of an importable class.
            - a class of `shardwise.models`, the diffusers class of the same name, or the name: its tiny
              configuration with random weights, none of them zero, and its tiny inputs.
            - a folder or hub id of a checkpoint: the ranks load their slices, and the reference is computed block
              by block, with the weights of one block at a time, on the input that the block has in the sharded
              run. Code of the model's own forward, between the blocks, is run but not compared.
        degree: Number of ranks, 2 or more.
        inputs: What the model is called with: keyword arguments, positional ones, or one tensor. Known for the
            classes of `shardwise.models`.
        plan: Module patterns and styles, in place of the plan declared for the class.
        dtype: What to compute in; by default a model's own, and fp32 for classes and checkpoints.
        device: `"cpu"` or `"cuda"`, for ranks that are started here; by default CUDA if each can have its own.
        subfolder: Folder of the checkpoint; by default `transformer` where `model` is a pipeline's folder.
        seed: For random weights, and for what a model draws; modules that are compared draw the same numbers.
        uneven: Whether heads that `degree` does not divide are shared.

    Raises:
        ConfigError: the degree is below 2, or nothing is known of the model or its inputs.
        PlanError: the plan does not fit the model.
        CheckpointError: files that are missing, invalid, or do not fit the model.
        GroupError: the running process group has another number of ranks.
        RankFailure: a rank failed otherwise.
    """
    if degree < 2:
        raise ConfigError(f"degree must be 2 or more, got {degree}: one rank is one process")
    subject = _subject(model, subfolder)
    if inputs is None and isinstance(subject, nn.Module) and family_of(type(subject)) is None:
        raise ConfigError(f"no inputs are known for {type(subject).__name__}: pass inputs=")
    job = Job(subject, degree, inputs, plan, dtype, seed, uneven)
    return job.run() if is_initialized() else _run_on_own_ranks(job, device)


def _run_on_own_ranks(job: Job, device: str | None) -> VerifyReport:
    outcomes = [o for o in run_ranks(_outcome, job.degree, job, device=device) if o is not None]
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if errors:  # the rank that failed knows more than those it told
        raise min(errors, key=lambda error: isinstance(error, RankFailure))
    report: VerifyReport = outcomes[0]
    return report


@dataclass(frozen=True)
class Job:
    """What every rank does: a model to make or take, and how to run it."""

    subject: nn.Module | type[Any] | Checkpoint
    degree: int
    inputs: Inputs | None
    plan: Plan | None
    dtype: torch.dtype | None
    seed: int
    uneven: bool = False

    def run(self) -> VerifyReport:
        """Compare on this rank, and return what all of them found."""
        start = time.perf_counter()
        # Unequal inputs would look like a mistake in the plan. The static check is another proof, and not this one.
        config = TensorParallelConfig(self.degree, check=False, debug=True, uneven=self.uneven)
        group = TensorParallelGroup.of(config)
        group.check(config)
        torch.manual_seed(self.seed)
        name, dtype, rows = self._compare(config, group.device)
        # A rank may meet other errors, but all meet the same modules.
        rows = worst(
            [[ModuleError(**row) for row in theirs] for theirs in group.exchange([vars(r) for r in rows])]
        )
        where, seconds = group.device.type, time.perf_counter() - start
        return VerifyReport(name, self.degree, str(dtype).removeprefix("torch."), where, rows, seconds)

    def _compare(
        self, config: TensorParallelConfig, device: torch.device
    ) -> tuple[str, torch.dtype, Sequence[ModuleError]]:
        subject = self.subject
        if isinstance(subject, Checkpoint):
            dtype = self.dtype or torch.float32
            sharded = subject.load(config, self.plan, self.dtype)
            call = self._call(sharded, dtype, device)
            return type(sharded).__name__, dtype, compare_by_block(subject, sharded, call, dtype, self.degree)
        if isinstance(subject, type):
            subject = tiny_model(subject, self.seed)
        cast(subject, self.dtype)
        dtype = main_dtype(subject)
        call = self._call(subject, self.dtype, device)
        with in_evaluation(subject):
            return (
                type(subject).__name__,
                dtype,
                self._compare_in_memory(subject, dtype, call, config, device),
            )

    def _compare_in_memory(
        self,
        whole: nn.Module,
        dtype: torch.dtype,
        call: Call,
        config: TensorParallelConfig,
        device: torch.device,
    ) -> list[ModuleError]:
        sharded = enable_parallelism(copy.deepcopy(whole), config=config, plan=self.plan)
        whole = whole.to(device)
        exact = copy.deepcopy(whole).float() if dtype in HALF else None
        return compare(Trio("", whole, sharded, exact, dtype, self.degree), call)

    def _call(self, model: nn.Module, dtype: torch.dtype | None, device: torch.device) -> Call:
        """Return the call of the model: with the inputs given, or those known of its class; floats as `dtype`."""
        inputs = self.inputs if self.inputs is not None else known_inputs(model)
        if isinstance(inputs, Mapping):
            call = Call((), inputs)
        else:
            call = Call((inputs,) if isinstance(inputs, Tensor) else tuple(inputs), {})
        return call.copy(lambda t: t.to(device, dtype if t.is_floating_point() else None))


def known_inputs(model: nn.Module) -> dict[str, Any]:
    """Return example inputs for a model of a known class.

    Raises:
        ConfigError: none are known.
    """
    inputs = example_inputs(model)
    if inputs is None:
        raise ConfigError(f"no inputs are known for {type(model).__name__}: pass inputs=")
    return inputs


def tiny_model(cls: type[Any], seed: int) -> nn.Module:
    """Return a model of a class's tiny configuration, with random weights, none of them zero.

    Zero-initialised gates, as new diffusers models have them, would hide whatever they are multiplied with.
    """
    model: nn.Module = cls(**family_of(cls).TINY_CONFIG)  # type: ignore[union-attr]  # `_subject` asked
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                noise *= prod(parameter.shape[1:]) ** -0.5
            else:
                noise = 0.2 * noise + (1.0 if name.endswith("weight") else 0.0)
            parameter.copy_(noise)
    return model


def main_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of most of a model's weights; some may be kept in fp32."""
    sizes: Counter[torch.dtype] = Counter({torch.float32: 0})
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0]


def cast(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast a model's floats, except those of modules it keeps in fp32."""
    if dtype is None:
        return
    keep = getattr(model, "_keep_in_fp32_modules", None) or ()
    kept = {keep} if isinstance(keep, str) else set(keep)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not kept & set(name.split(".")):
            tensor.data = tensor.data.to(dtype)


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Run with dropout off, and leave each module in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _subject(model: Any, subfolder: str | None) -> nn.Module | type[Any] | Checkpoint:
    """Return what `model` stands for.

    Raises:
        ConfigError: it stands for nothing that can be verified.
    """
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, type):
        model = model.__name__
    if not isinstance(model, (str, Path)):
        raise ConfigError(f"expected a model, a class, a name or a folder, got {type(model).__name__}")
    if str(model) in models.FAMILIES:
        return model_class(str(model))
    if isinstance(model, Path) or "/" in model or Path(model).exists():
        return Checkpoint.find(str(model), subfolder)
    raise ConfigError(
        f"{model} has no tiny configuration to verify: pass a model in memory with inputs=, a folder, "
        f"or one of {', '.join(models.FAMILIES)}"
    )


def _outcome(job: Job) -> VerifyReport | Exception:
    """Return what the job returns or raises: an exception does not find its way out of a process by itself."""
    try:
        return job.run()
    except ShardwiseError as error:
        return error
    except Exception:
        return RankFailure(f"verification failed on a rank:\n{traceback.format_exc()}")
