"""Functions that numba compiles at their first call.

Importing numba takes half a second. Modules with kernels can be imported without it, so commands that call none start
sooner.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

_lock = threading.RLock()


class NumbaKernel:
    """A function that numba compiles at its first call; the machine code is cached on disk, and calls release the GIL.

    Args:
        function: the function; kernels that it calls are compiled with it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the function's result."""
        return self.dispatcher(*arguments, **keywords)

    @functools.cached_property
    def dispatcher(self) -> Callable[..., Any]:
        """Numba's compiled function."""
        import numba

        with _lock:
            compiled: Callable[..., Any] = numba.njit(cache=True, nogil=True)(self._function)
            # Numba looks up called functions in the module's globals, and needs its own there.
            names = self._function.__globals__
            for name in self._function.__code__.co_names:
                called = names.get(name)
                if isinstance(called, NumbaKernel):
                    names[name] = compiled if called is self else called.dispatcher
            return compiled


def numba_kernel(function: Callable[..., Any]) -> Any:
    """Return a function that is compiled at its first call, as `NumbaKernel`."""
    return NumbaKernel(function)
