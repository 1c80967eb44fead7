"""What the nodes share that take a kernel's place in a parameter tree: a sketch slot, a kernel with adapters."""

from dataclasses import replace
from typing import Any, TypeVar

Node = TypeVar("Node", bound="StandIn")


class StandIn:
    """Answers for its `kernel`; subclasses are frozen dataclasses with that field, and add `x @ node`."""

    kernel: Any

    __array_ufunc__ = None  # numpy arrays on the left leave `@` to us

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        return tuple(self.kernel.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the kernel."""
        return self.kernel.dtype

    @property
    def ndim(self) -> int:
        """Number of axes of the kernel."""
        return int(self.kernel.ndim)

    def astype(self: Node, dtype: Any) -> Node:
        """Casts the kernel; what is beside it stays float32, so that its gradient is."""
        return replace(self, kernel=self.kernel.astype(dtype))  # type: ignore[type-var]
