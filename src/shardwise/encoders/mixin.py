"""What makes a text encoder of transformers tensor parallel: one mixin in front of it, and a `sharding_plan`."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from shardwise.checkpoint.report import LoadReport
from shardwise.config import TensorParallelConfig
from shardwise.encoders.options import EncoderOptions
from shardwise.errors import UnsupportedOption
from shardwise.models.options import LoadOptions
from shardwise.models.parallelism import as_config, enable_parallelism, load_sharded
from shardwise.plan.resolve import Plan
from shardwise.runtime.modes import outside_inference_mode


class EncoderMixin:
    """Gives a model class of transformers sharded loading, and refusals of what a sharded model cannot do.

    Put it first among the bases and declare the plan, which transformers' own `_tp_plan` is not:

        class MyEncoder(EncoderMixin, transformers.MyEncoder):
            sharding_plan = {"layers.*.self_attn.q_proj": "colwise", ...}
    """

    sharding_plan: ClassVar[Plan]
    """Module patterns and styles."""
    library: ClassVar[type[LoadOptions]] = EncoderOptions
    """What transformers does otherwise than diffusers."""
    load_report: LoadReport
    """What this rank read, on a model that was loaded sharded."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance that pipelines save as the class of transformers it stands in for."""
        instance = super().__new__(cls)
        instance.__dict__["__module__"] = cls.__mro__[cls.__mro__.index(EncoderMixin) + 1].__module__
        return instance

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: checkpoints of this class are those of the class of transformers, old names included."""
        return False

    @classmethod
    @outside_inference_mode()
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model; with `parallel_config=TensorParallelConfig(...)` each rank reads only its own slices.

        All other arguments are those of transformers' `from_pretrained`, and so is the dtype: that of the checkpoint's
        configuration, if none is asked for. At degree 1 the ordinary model is returned and no process group is needed.
        The sharded model is on the rank's device already.

        Raises:
            UnsupportedOption: `device_map`, `quantization_config`, or another option that slices do not go with, or
                weights that are not safetensors; before any file is opened.
            PlanError: the plan does not fit the model at this degree; before any weight is read.
            CheckpointError: files that are missing, invalid, or do not fit the model.
            GroupError: there is no process group of this size, or this process is not in it.
            RankFailure: another rank failed.
        """
        config = kwargs.pop("parallel_config", None)
        config = as_config(config) if config is not None else TensorParallelConfig(1)
        if config.tp_degree == 1:
            loader: Any = super()
            return loader.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        if args:
            raise UnsupportedOption(
                f"{cls.__name__}.from_pretrained takes no arguments by position beside the location when it loads "
                "slices: pass them by name"
            )
        return load_sharded(cls, pretrained_model_name_or_path, config, kwargs)

    def enable_parallelism(self, *, config: TensorParallelConfig, plan: Plan | None = None) -> None:
        """Shard this model, which is in memory; see `shardwise.enable_parallelism` for what it costs."""
        assert isinstance(self, nn.Module)
        enable_parallelism(self, config=config, plan=plan)
