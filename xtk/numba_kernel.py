"""Functions that numba compiles at their first call.

Importing numba takes half a second. Modules with kernels can be imported without it, so commands that call none start
sooner.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

_lock = threading.RLock()


class NumbaKernel:
    """A function that numba compiles at its first call; the machine code is cached on disk, and calls release the GIL.

    The compiled function then takes its place in all modules that imported it, so that further calls cost nothing more.
    `function`: the function; kernels that it calls are compiled with it.
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
            own = self._function.__globals__
            for name in self._function.__code__.co_names:
                if isinstance(own.get(name), NumbaKernel) and own[name] is not self:
                    own[name] = own[name].dispatcher  # numba needs its own functions there
            name = self._function.__name__
            for module in list(sys.modules.values()):
                names = getattr(module, "__dict__", {})
                if names.get(name) is self:
                    names[name] = compiled
            return compiled


def numba_kernel(function: Callable[..., Any]) -> Any:
    """Return a function that is compiled at its first call, as `NumbaKernel`."""
    return NumbaKernel(function)
