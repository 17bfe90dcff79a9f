"""Data parallelism: a list of prompts shared out over replicas of a pipeline, and the pictures put together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import UnsupportedOperation, UnsupportedOption
from shardwise.runtime.agreement import PATIENCE
from shardwise.runtime.group import TensorParallelGroup
from shardwise.runtime.mesh import ranks_along
from shardwise.runtime.shard import digest

_S = TypeVar("_S", bound=Sequence[Any] | Tensor)

_COUNTS = ("num_images_per_prompt", "num_videos_per_prompt")


def split_prompts(prompts: _S, rank: int, degree: int) -> _S:
    """Return the prompts that one of `degree` replicas draws: neighbours, and one more on the first than on the last.

    Also for anything else that there is one of for each prompt, such as the rows of a tensor.
    """
    return prompts[_share(len(prompts), rank, degree)]  # type: ignore[return-value]  # a slice of its own kind


def _share(count: int, rank: int, degree: int) -> slice:
    each, more = divmod(count, degree)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


def spread_prompts(
    pipeline: Callable[..., Any],
    prompts: Sequence[str],
    *,
    mesh: DeviceMesh,
    generator: Sequence[torch.Generator] | None,
    timeout: float = PATIENCE.total_seconds(),
    **call: Any,
) -> Any:
    """Draw each prompt on one replica of a pipeline, over the axis "dp" of a mesh, and return all pictures everywhere.

    Every rank makes the call with all prompts. What a prompt is drawn from does not depend on the number of replicas:
    each picture has a generator of its own. Batches are smaller than in one process, so pictures are the same but for
    rounding. A replica without a prompt waits.

    Args:
        pipeline: This replica's.
        prompts: All of them, in the same order on every rank.
        mesh: That of `shardwise.init_mesh(config)`, or its axis.
        generator: One for each picture, prompt by prompt, equally seeded on every rank.
        timeout: Seconds that a replica waits for the slowest one after it has drawn its own.
        call: The other arguments of the pipeline. Lists and tensors with an entry for each prompt are shared out if
            "prompt" is in their name (`negative_prompt`, `prompt_2`).

    Returns:
        What the pipeline returns first, of all prompts: a list of pictures or of videos, an array or a tensor.

    Raises:
        UnsupportedOption: there is one generator for all, or none, or not one for each picture.
        UnsupportedOperation: pictures of different sizes.
        ConfigError: `mesh` has no such axis.
        RankFailure: another replica failed, or has other prompts.
    """
    group = ranks_along(mesh, "dp")
    each = next((call[name] for name in _COUNTS if call.get(name) is not None), 1)
    _check_generators(generator, len(prompts) * each)
    share = _share(len(prompts), group.rank, group.degree)
    own = {name: value[share] for name, value in _per_prompt(prompts, call).items()}
    own["generator"] = list(generator or ())[share.start * each : share.stop * each]
    subject = f"drawing {len(prompts)} prompts on {group.degree} replicas"
    try:
        drawn = pipeline(**call | own)[0] if own["prompt"] else None
        pictures = Pictures.of(drawn) if drawn is not None else None
    except BaseException as error:
        group.give_up(error)
        raise
    with group.agreement(subject, timedelta(seconds=timeout)) as step:
        step.say(pictures.describe() if pictures is not None else None)
        step.must_equal(prompts=f"{len(prompts)} ({digest(list(prompts))})")
    return _gather(pictures, step.heard, group)


@dataclass(frozen=True)
class Pictures:
    """Pictures or videos as one tensor, and as what the pipeline returned them."""

    rows: Tensor
    kind: str

    @classmethod
    def of(cls, drawn: Any) -> Pictures:
        """Return what a pipeline has drawn.

        Raises:
            UnsupportedOperation: pictures of different sizes, or something else.
        """
        if isinstance(drawn, Tensor):
            return cls(drawn, "pt")
        if isinstance(drawn, np.ndarray):
            return cls(torch.from_numpy(drawn), "np")
        if isinstance(drawn, list) and drawn and isinstance(drawn[0], Tensor):
            return cls(torch.stack(drawn), "list")
        kind = "videos" if isinstance(drawn, list) and drawn and isinstance(drawn[0], list) else "pil"
        try:
            arrays = np.stack(
                [np.stack([*map(np.asarray, v)]) if kind == "videos" else np.asarray(v) for v in drawn]
            )
            return cls(torch.from_numpy(arrays), kind)
        except (TypeError, ValueError) as error:
            raise UnsupportedOperation(
                f"pictures are gathered if all are of one size and kind: {error}"
            ) from error

    def describe(self) -> list[Any]:
        """Return the number of pictures, and what must be the same on all replicas."""
        return [
            len(self.rows),
            list(self.rows.shape[1:]),
            str(self.rows.dtype).removeprefix("torch."),
            self.kind,
        ]

    def build(self) -> Any:
        """Return them as the pipeline would."""
        if self.kind == "pt":
            return self.rows
        if self.kind == "list":
            return list(self.rows)
        array = self.rows.cpu().numpy()
        if self.kind == "np":
            return array
        return [
            [*map(Image.fromarray, row)] if self.kind == "videos" else Image.fromarray(row) for row in array
        ]


def _check_generators(generator: Any, pictures: int) -> None:
    if generator is None or isinstance(generator, torch.Generator):
        raise UnsupportedOption(
            f"generator is {'left out' if generator is None else 'one for all'}: what a picture is drawn from would "
            "depend on the number of replicas: pass one for each picture, "
            "[torch.Generator().manual_seed(seed + i) for i in range(n)]"
        )
    if len(generator) != pictures:
        raise UnsupportedOption(
            f"there are {len(generator)} generators for {pictures} pictures: pass one for each"
        )


def _per_prompt(prompts: Sequence[str], call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that have an entry for each prompt."""
    given = {
        name: value for name, value in call.items() if "prompt" in name and isinstance(value, list | Tensor)
    }
    return {"prompt": list(prompts)} | {name: v for name, v in given.items() if len(v) == len(prompts)}


def _gather(own: Pictures | None, heard: Sequence[Any], group: TensorParallelGroup) -> Any:
    known = [said for said in heard if said is not None]
    if len({str(said[1:]) for said in known}) > 1:
        listing = "\n".join(f"  replica {i}: {said}" for i, said in enumerate(heard))
        raise UnsupportedOperation(f"pictures are gathered if all are of one size and kind\n{listing}")
    counts = [said[0] if said is not None else 0 for said in heard]
    _, shape, dtype, kind = known[0]
    row = torch.zeros(max(counts), *shape, dtype=getattr(torch, dtype), device=group.device)
    if own is not None:
        row[: len(own.rows)] = own.rows
    rows = row.new_empty(group.degree, *row.shape)
    group.all_gather(rows, row)
    return Pictures(
        torch.cat([theirs[:count] for theirs, count in zip(rows, counts, strict=True)]), kind
    ).build()
