"""What makes a diffusers model class tensor parallel: one mixin in front of it, and a `_tp_plan`."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.errors import UnsupportedOperation
from shardwise.models.parallelism import as_config, enable_parallelism, is_context_parallel, load_sharded
from shardwise.plan.resolve import Plan
from shardwise.runtime.shard import sharding_of


class TensorParallelMixin:
    """Gives a diffusers model class sharded loading, and clear refusals of what a sharded model cannot do.

    Put it first among the bases and declare the plan:

        class MyTransformer(TensorParallelMixin, ModelMixin, ConfigMixin):
            _tp_plan = {"blocks.*.attn.to_q": "colwise", ..., "blocks.*.attn.to_out": "rowwise"}
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """Load a model; with `parallel_config=TensorParallelConfig(...)` each rank reads only its own slices.

        All other arguments are those of diffusers' `from_pretrained`. At degree 1 the ordinary model is
        returned and no process group is needed. The sharded model is on the rank's device already.

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
            return loader.from_pretrained(pretrained_model_name_or_path, **kwargs)
        if is_context_parallel(config):
            return loader.from_pretrained(pretrained_model_name_or_path, parallel_config=config, **kwargs)
        config = as_config(config)
        if config.tp_degree == 1:
            return loader.from_pretrained(pretrained_model_name_or_path, **kwargs)
        return load_sharded(cls, pretrained_model_name_or_path, config, kwargs)

    def enable_parallelism(self, *, config: Any, plan: Plan | None = None, cp_plan: Any = None) -> None:
        """Shard this model, which is in memory; see `shardwise.enable_parallelism` for what it costs.

        `cp_plan` is for diffusers' context parallelism, whose configs are passed on.
        """
        if is_context_parallel(config):
            parent: Any = super()
            parent.enable_parallelism(config=config, cp_plan=cp_plan)
            return
        assert isinstance(self, nn.Module)
        enable_parallelism(self, config=config, plan=plan)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save an ordinary model as diffusers does; a sharded one is refused, because it holds slices."""
        self._refuse_if_sharded("save_pretrained", "save the model before sharding it")
        parent: Any = super()
        return parent.save_pretrained(save_directory, *args, **kwargs)

    def load_lora_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load a LoRA adapter into an ordinary model; refused on a sharded one."""
        self._refuse_if_sharded("load_lora_adapter", _ADAPTER_HINT)
        parent: Any = super()
        return parent.load_lora_adapter(*args, **kwargs)

    def add_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Add a PEFT adapter to an ordinary model; refused on a sharded one."""
        self._refuse_if_sharded("add_adapter", _ADAPTER_HINT)
        parent: Any = super()
        return parent.add_adapter(*args, **kwargs)

    def enable_group_offload(self, *args: Any, **kwargs: Any) -> Any:
        """Offload groups of modules of an ordinary model; refused on a sharded one."""
        self._refuse_if_sharded(
            "enable_group_offload", "each rank holds only its slices, raise tp_degree instead"
        )
        parent: Any = super()
        return parent.enable_group_offload(*args, **kwargs)

    def enable_layerwise_casting(self, *args: Any, **kwargs: Any) -> Any:
        """Store an ordinary model's weights in another dtype than it computes in; refused on a sharded one."""
        self._refuse_if_sharded("enable_layerwise_casting", "load the model in the dtype you need")
        parent: Any = super()
        return parent.enable_layerwise_casting(*args, **kwargs)

    def _refuse_if_sharded(self, operation: str, hint: str) -> None:
        assert isinstance(self, nn.Module)
        if sharding_of(self) is not None:
            raise UnsupportedOperation(
                f"{operation} is not supported on {type(self).__name__}, which is sharded with tensor "
                f"parallelism: {hint}"
            )


_ADAPTER_HINT = "fuse the adapter into the weights and save them before sharding"
