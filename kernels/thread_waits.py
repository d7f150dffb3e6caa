"""How long the threads of PyTorch's operations (GCC's OpenMP) spin while they wait for each other."""

import contextlib
import os
from collections.abc import Iterator

_VARIABLE, _OTHER = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
_SPINS = "1000"


def wait_briefly() -> None:
    """Some 50 us, then sleep. To be called before PyTorch is imported; who has set either variable is not overruled.

    By default it is a millisecond and more, in which a thread keeps a processor from the one that it waits for. With
    another program busy beside two threads on two cores of a Xeon, 256 tokens in and 24 out of SmolLM2 took 0.53 to
    0.62 s so, and 0.76 to 1.5 s by default, where steps of 80 to 180 ms occur.
    """
    if _OTHER not in os.environ:
        os.environ.setdefault(_VARIABLE, _SPINS)


@contextlib.contextmanager
def usual_waits() -> Iterator[None]:
    """Processes started inside wait as they do by default."""
    is_ours = os.environ.get(_VARIABLE) == _SPINS
    if is_ours:
        del os.environ[_VARIABLE]
    try:
        yield
    finally:
        if is_ours:
            os.environ[_VARIABLE] = _SPINS
