"""xtk: distill large language models across tokenizers.

The Python API is loaded on access: `import xtk` imports neither torch nor numpy.
docs/reference/python.md lists it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from xtk.api.alignment import Alignment as Alignment
    from xtk.api.alignment import align as align
    from xtk.api.cache_from_arrays import CacheWriter as CacheWriter
    from xtk.api.cache_from_model import cache_teacher as cache_teacher
    from xtk.api.distillation_collator import DistillationCollator as DistillationCollator
    from xtk.api.distillation_loss import DistillationLoss as DistillationLoss
    from xtk.api.distillation_loss import enable_packing as enable_packing
    from xtk.api.projections import Projection as Projection
    from xtk.api.projections import build_projection as build_projection
    from xtk.cache.reader import TeacherCache as TeacherCache
    from xtk.errors import XtkError as XtkError

# The public names, and the modules that define them.
PUBLIC = {
    "align": "xtk.api.alignment",
    "Alignment": "xtk.api.alignment",
    "build_projection": "xtk.api.projections",
    "Projection": "xtk.api.projections",
    "cache_teacher": "xtk.api.cache_from_model",
    "CacheWriter": "xtk.api.cache_from_arrays",
    "TeacherCache": "xtk.cache.reader",
    "DistillationCollator": "xtk.api.distillation_collator",
    "DistillationLoss": "xtk.api.distillation_loss",
    "enable_packing": "xtk.api.distillation_loss",
    "XtkError": "xtk.errors",
}
__all__ = ["__version__", *PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'xtk' has no attribute {name!r}")
    return getattr(importlib.import_module(PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
