"""The training loop that all stages share, and the few things each of them needs around it.

Owns the order of one step (loss, gradients, clipping, optimizers, rates, moving average). Knows no model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import click
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .settings import Schedule

LARGEST_GRADIENT = 1.0
STEPS_BETWEEN_REPORTS = 50


def fit(
    stage: str,
    batch_loss: Callable[[], Tensor],
    parameters: Sequence[nn.Parameter],
    optimizers: Sequence[Optimizer],
    schedule: Schedule,
) -> list[float]:
    """Train parameters to lower a loss, leave them at their moving average, and return the loss of each step."""
    average = [parameter.detach().clone() for parameter in parameters]
    rates = [LambdaLR(optimizer, schedule.rate) for optimizer in optimizers]
    losses: list[float] = []
    started = time.monotonic()
    for step in range(schedule.steps):
        losses.append(_take_step(batch_loss, parameters, optimizers))
        for rate in rates:
            rate.step()
        for kept, parameter in zip(average, parameters, strict=True):
            kept.lerp_(parameter.detach(), 1 - schedule.memory(step))
        if step % STEPS_BETWEEN_REPORTS == 0 or step == schedule.steps - 1:
            _report(stage, losses, schedule, time.monotonic() - started)
    with torch.no_grad():
        for kept, parameter in zip(average, parameters, strict=True):
            parameter.copy_(kept)
    return losses


def _take_step(
    batch_loss: Callable[[], Tensor], parameters: Sequence[nn.Parameter], optimizers: Sequence[Optimizer]
) -> float:
    loss = batch_loss()
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(parameters, LARGEST_GRADIENT)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def _report(stage: str, losses: list[float], schedule: Schedule, seconds: float) -> None:
    recent = losses[-STEPS_BETWEEN_REPORTS:]
    mean = sum(recent) / len(recent)
    click.echo(f"{stage}: step {len(losses)} of {schedule.steps}, loss {mean:.4f}, {seconds:.0f} s")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Make torch's random numbers repeatable inside the block, and put its generator back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def round_to_bfloat16(module: nn.Module) -> None:
    """Round every weight to what a bfloat16 file can hold, so that later stages see the weights as loaded."""
    for weight in module.state_dict().values():
        weight.copy_(weight.to(torch.bfloat16))
