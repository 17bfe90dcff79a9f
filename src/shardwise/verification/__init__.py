"""Numerical verification: N ranks against one process, module by module, each on the same input.

Owns what is compared, how errors are judged and how they are shown. Models, plans and ranks are those of the rest
of the package; nothing here knows a model class.
"""

from __future__ import annotations

from shardwise.verification.report import ModuleError, VerifyReport
from shardwise.verification.run import verify

__all__ = ["ModuleError", "VerifyReport", "verify"]
