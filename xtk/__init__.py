"""xtk: distill large language models across tokenizers.

The Python API is loaded on access: `import xtk` imports neither torch nor numpy.
docs/reference/python.md lists it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from xtk.cache.reader import TeacherCache as TeacherCache
    from xtk.errors import XtkError as XtkError
    from xtk.library.alignment import Alignment as Alignment
    from xtk.library.alignment import align as align
    from xtk.library.cache_from_arrays import CacheWriter as CacheWriter
    from xtk.library.cache_from_model import cache_teacher as cache_teacher
    from xtk.library.distillation_collator import DistillationCollator as DistillationCollator
    from xtk.library.distillation_loss import DistillationLoss as DistillationLoss
    from xtk.library.packing import enable_packing as enable_packing
    from xtk.library.projections import Projection as Projection
    from xtk.library.projections import build_projection as build_projection

# The public names, and the modules that define them.
PUBLIC = {
    "align": "xtk.library.alignment",
    "Alignment": "xtk.library.alignment",
    "build_projection": "xtk.library.projections",
    "Projection": "xtk.library.projections",
    "cache_teacher": "xtk.library.cache_from_model",
    "CacheWriter": "xtk.library.cache_from_arrays",
    "TeacherCache": "xtk.cache.reader",
    "DistillationCollator": "xtk.library.distillation_collator",
    "DistillationLoss": "xtk.library.distillation_loss",
    "enable_packing": "xtk.library.packing",
    "XtkError": "xtk.errors",
}
__all__ = ["__version__", *PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'xtk' has no attribute {name!r}")
    return getattr(importlib.import_module(PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
