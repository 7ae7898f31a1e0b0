"""Triton's names: kernels can be defined, and not be launched."""

from typing import Any

from stand_in import attributes, with_submodules

__version__ = "3.5.0"
__getattr__ = attributes(__name__)
with_submodules(__name__)


class Config:
    """How a kernel may be tuned."""

    def __init__(self, kwargs: dict[str, Any] | None = None, **more: Any) -> None:
        self.kwargs = kwargs or {}


def cdiv(number: int, divisor: int) -> int:
    """Division, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << max(0, number - 1).bit_length()
