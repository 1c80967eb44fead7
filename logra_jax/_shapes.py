"""Shape annotations: jaxtyping where it is installed (tests check them by machine), plain aliases elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, UInt32
else:
    try:
        from jaxtyping import Array, Bool, Float, Int, UInt32
    except ModuleNotFoundError:

        class _Plain:
            def __class_getitem__(cls, _: object) -> Any:
                return Any

        Array, Bool, Float, Int, UInt32 = Any, _Plain, _Plain, _Plain, _Plain

__all__ = ["Array", "Bool", "Float", "Int", "UInt32"]
