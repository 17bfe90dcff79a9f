"""What makes a diffusers model class tensor parallel: one mixin in front of it, and a `_tp_plan`."""

from __future__ import annotations

from functools import wraps
from typing import Any, cast

from diffusers import ModelMixin
from torch import nn

from shardwise.checkpoint.report import LoadReport
from shardwise.errors import UnsupportedOption, UnsupportedState
from shardwise.models.parallelism import (
    as_config,
    enable_parallelism,
    is_context_parallel,
    is_sharded_folder,
    load_sharded,
    load_whole,
)
from shardwise.plan.check import CheckReport
from shardwise.plan.resolve import Plan
from shardwise.runtime.modes import outside_inference_mode
from shardwise.runtime.shard import sharding_of


class TensorParallelMixin:
    """Gives a diffusers model class sharded loading, and clear refusals of what a sharded model cannot do.

    Put it first among the bases and declare the plan:

        class MyTransformer(TensorParallelMixin, ModelMixin, ConfigMixin):
            _tp_plan = {"blocks.*.attn.to_q": "colwise", ..., "blocks.*.attn.to_out": "rowwise"}
    """

    load_report: LoadReport
    """What this rank read, on a model that was loaded sharded."""
    check_report: CheckReport | None
    """What the static check found and cost, on a sharded model; None if it is off or has not run yet."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance that pipelines save as the diffusers class it stands in for."""
        instance = super().__new__(cls)
        for base in cls.__mro__:
            if base.__name__ == cls.__name__ and base.__module__.startswith("diffusers."):
                instance.__dict__["__module__"] = base.__module__
        return instance

    @classmethod
    @outside_inference_mode()
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """Load a model; with `parallel_config=TensorParallelConfig(...)` each rank reads only its own slices.

        All other arguments are those of diffusers' `from_pretrained`. At degree 1 the ordinary model is
        returned and no process group is needed. The sharded model is on the rank's device already. A folder with a
        file for each rank, from `save_pretrained(sharded=True)`, is read at any degree.

        Raises:
            UnsupportedOption: `device_map`, `quantization_config`, `low_cpu_mem_usage=False`,
                `use_flashpack=True`, or weights that are not safetensors; before any file is opened.
            PlanError: the plan does not fit the model at this degree; before any weight is read.
            CheckpointError: files that are missing, invalid, or do not fit the model.
            GroupError: there is no process group of this size, or this process is not in it.
            RankFailure: another rank failed.
        """
        config = kwargs.pop("parallel_config", None)
        loader: Any = super()
        if config is None:
            if is_sharded_folder(pretrained_model_name_or_path, kwargs):
                return load_whole(cls, pretrained_model_name_or_path, kwargs)
            return loader.from_pretrained(pretrained_model_name_or_path, **kwargs)
        if is_context_parallel(config):
            return loader.from_pretrained(pretrained_model_name_or_path, parallel_config=config, **kwargs)
        config = as_config(config)
        if config.tp_degree == 1:
            return cls.from_pretrained(pretrained_model_name_or_path, **kwargs)
        return load_sharded(cls, pretrained_model_name_or_path, config, kwargs)

    @classmethod
    @outside_inference_mode()
    def from_single_file(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a model whole from a file of an original format, as diffusers does.

        Raises:
            UnsupportedOption: `parallel_config`, which diffusers would pass over in silence.
        """
        if kwargs.pop("parallel_config", None) is not None:
            raise UnsupportedOption(
                f"from_single_file cannot load {cls.__name__} sharded, because the names and blocks of an original "
                "format are converted as a whole: load it, save it with save_pretrained, and load that folder with "
                "from_pretrained(parallel_config=...); or shard it in memory with enable_parallelism"
            )
        loader: Any = super()
        return loader.from_single_file(*args, **kwargs)

    @wraps(ModelMixin.save_pretrained, assigned=())
    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save a model; a sharded one is saved by all ranks together, see `shardwise.models.saving.save_sharded`.

        Raises:
            UnsupportedOption: `sharded=True` for a model that is not sharded.
        """
        if kwargs.pop("sharded", False):
            raise UnsupportedOption(
                f"sharded=True writes a file for each rank, and this {type(self).__name__} is not sharded: "
                "leave it out, or cut the saved folder with `shardwise shard`"
            )
        saver: Any = super()
        saver.save_pretrained(save_directory, *args, **kwargs)

    def enable_parallelism(self, *, config: Any, plan: Plan | None = None, cp_plan: Any = None) -> None:
        """Shard this model, which is in memory; see `shardwise.enable_parallelism` for what it costs.

        `cp_plan` is for diffusers' context parallelism, whose configs are passed on.
        """
        if is_context_parallel(config):
            if sharding_of(cast(nn.Module, self)) is not None:
                raise UnsupportedState(
                    f"this {type(self).__name__} is sharded: cut its sequence with shardwise.enable_context_parallel("
                    "model, mesh=...)"
                )
            parent: Any = super()
            parent.enable_parallelism(config=config, cp_plan=cp_plan)
            return
        assert isinstance(self, nn.Module)
        enable_parallelism(self, config=config, plan=plan)
