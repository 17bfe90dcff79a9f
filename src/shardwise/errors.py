"""The exceptions a user can meet, and the finding that most of them carry.

    ShardwiseError
    ├── ConfigError          (ValueError)           a config that cannot be meant
    ├── PlanError            (ValueError)           a plan that does not fit the model; carries *all* findings
    ├── UnsupportedOption    (ValueError)           a loading option that tensor parallelism cannot honour
    ├── UnsupportedState     (RuntimeError)         a model in a state that cannot be sharded
    ├── UnsupportedOperation (NotImplementedError)  something a sharded model cannot do
    ├── CheckpointError      (RuntimeError)         files that are missing, invalid, or do not fit the model
    ├── OutputError          (RuntimeError)         pictures or reports that cannot be written
    ├── NotFinite            (ArithmeticError)      a picture of numbers that are not finite
    ├── GroupError           (RuntimeError)         no process group, or this rank is not in it
    ├── RankFailure          (RuntimeError)         another rank failed; its message is repeated here
    └── UnequalInputs        (RuntimeError)         the ranks called one model with different inputs

Owns the wording frame only: every message says what is wrong, where, and what would fix it. Imports nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class ShardwiseError(Exception):
    """Any error that shardwise raises on purpose."""


class ConfigError(ShardwiseError, ValueError):
    """A `TensorParallelConfig` or `ParallelConfig` that contradicts itself, or is not one, or not on these devices."""


class UnsupportedOption(ShardwiseError, ValueError):
    """A loading option that cannot be combined with tensor parallelism; raised before any file is opened."""


class UnsupportedState(ShardwiseError, RuntimeError):
    """A model that cannot be sharded as it is: quantized, offloaded, adapted, or sharded already."""


class UnsupportedOperation(ShardwiseError, NotImplementedError):
    """An operation that a sharded model does not support."""


class CheckpointError(ShardwiseError, RuntimeError):
    """Weight files that are missing, invalid, or do not fit the model; raised on every rank if on one."""


class OutputError(ShardwiseError, RuntimeError):
    """A file with results that cannot be written: no room, no permission, or nothing installed to write it with."""


class NotFinite(ShardwiseError, ArithmeticError):
    """A picture that would be drawn from numbers that are infinite or none; raised before it is decoded."""


class GroupError(ShardwiseError, RuntimeError):
    """There is no process group to shard over, or this process is not a member of it."""


class RankFailure(ShardwiseError, RuntimeError):
    """Another rank failed in a step that all ranks take together."""


class UnequalInputs(ShardwiseError, RuntimeError):
    """The ranks called one model with different inputs; raised on all: in debug mode, and by a spread decode."""


@dataclass(frozen=True)
class Finding:
    """One fault of a plan: what is wrong, where, and what would fix it.

    `kind` is a stable name such as `"IndivisibleBlock"`, `module` the path inside the model, `plan_key` the
    entry of the plan, `source` a `file:line` of the model's code where one is known. Equal findings of
    repeated blocks are one finding with a `count`; `module` is then the first of them.
    """

    kind: str
    module: str
    message: str
    fix: str
    plan_key: str | None = None
    source: str | None = None
    count: int = 1

    def __str__(self) -> str:
        """Return the finding as three indented lines, the form every error uses."""
        key = f' (plan key "{self.plan_key}")' if self.plan_key is not None else ""
        key += f" x{self.count}" if self.count > 1 else ""
        where = f"{self.source}: " if self.source else ""
        return f"{self.kind}: {self.module}{key}\n  {where}{self.message}\n  fix: {self.fix}"


class PlanError(ShardwiseError, ValueError):
    """A plan that does not fit its model.

    `findings` holds every fault, not only the first; `degrees` the tensor parallel degrees that would divide
    every block and every head count of the plan.
    """

    def __init__(
        self, findings: Iterable[Finding], subject: str = "", degrees: Iterable[int] | None = None
    ) -> None:
        self.findings = tuple(findings)
        self.subject = subject
        self.degrees = tuple(degrees) if degrees is not None else None
        super().__init__(self.findings, subject, self.degrees)

    def __str__(self) -> str:
        """Return a headline, all findings, and the degrees that would work where the degree is at fault."""
        count = len(self.findings)
        head = f"{count} problem{'s' if count != 1 else ''} in the tensor parallel plan"
        lines = [f"{head}{f' of {self.subject}' if self.subject else ''}", *map(str, self.findings)]
        if self.degrees and any(finding.kind.startswith("Indivisible") for finding in self.findings):
            lines.append(f"degrees that fit the whole plan: {', '.join(map(str, self.degrees))}")
        return "\n".join(lines)
