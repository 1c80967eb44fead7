"""Updates applied to a served model's own tensors, however its loader has fused, cut and spread them. Needs torch.

No layout is known here: the model's loader is asked. It loads a tensor without values, once per weight, and each copy
that it makes tells which block of which parameter receives which block of the file's tensor on this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from logra_jax.errors import UserError
from logra_jax.optim import twin
from logra_jax.sync.blob import Update


class Model(Protocol):
    """What is asked of a model: vLLM's have it."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Copies tensors of a Hugging Face file to where they belong, as far as they belong on this rank."""

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As that of `torch.nn.Module`."""


@dataclass(frozen=True)
class Block:
    """A part of a file's tensor, (first, last + 1) along each axis, and the view of a parameter that holds it.

    residual: what a bfloat16 view lacks of the sum of its updates, None for one of float32.
    """

    part: tuple[tuple[int, int], ...]
    parameter: str
    view: torch.Tensor
    residual: torch.Tensor | None


class Weights:
    """The weights of one rank, at a version.

    Args:
      model: see `Model`; its tensors are written in place.
      shapes: of all tensors that updates will bring, by their names in a text model's file: targets `[d, k]` and
        dense ones.
      version: what the weights are now.
      residual: keep, beside bfloat16 targets, another bfloat16 number of what rounding lost; without it updates far
        below a weight's resolution are lost.
      prefix: what the model's own file has for "model." at the start of a name.

    Raises:
      UserError: the loader does more than copy one of these tensors, or they were repacked or quantized.
    """

    def __init__(
        self,
        model: Model,
        shapes: Mapping[str, Iterable[int]],
        version: int = 0,
        residual: bool = True,
        prefix: str = "model.",
    ) -> None:
        self.model, self.version = model, version
        self.digest = ""  # of the last blob
        self.broken = ""  # why the weights are of no version
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._residual, self._prefix = residual, prefix
        self.blocks = {name: self._find(name) for name in self._shapes}

    def parts(self) -> dict[str, list[tuple[tuple[int, int], ...]]]:
        """What this rank holds of each tensor: the parts of its blocks."""
        return {name: [block.part for block in blocks] for name, blocks in self.blocks.items()}

    def _find(self, name: str) -> list[Block]:
        """The blocks of one tensor; none on a rank that does not have the layer."""
        probe = torch.empty(self._shapes[name], device="meta")
        stored = self._prefix + name.removeprefix("model.") if name.startswith("model.") else name
        with torch.no_grad(), _Copies() as copies:
            self.model.load_weights([(stored, probe)])
        found = []
        for view, source in copies.seen:
            if view.shape != source.shape:
                raise UserError(f"{name}: a parameter of shape {tuple(view.shape)} is to take {tuple(source.shape)}")
            found.append(self._block(name, view, source, probe))
        return found

    def _block(self, name: str, view: torch.Tensor, source: torch.Tensor, probe: torch.Tensor) -> Block:
        if source.untyped_storage()._cdata != probe.untyped_storage()._cdata or source.stride() != probe.stride():
            raise UserError(f"{name}: its loader does not copy a plain block; this weight cannot be synced in place")
        owner = [n for n, p in self.model.named_parameters() if _holds(p, view)]
        if not owner:
            raise UserError(f"{name}: its loader does not write to a parameter; this weight cannot be synced in place")
        if view.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(f"{name}: it is served as {view.dtype}; quantized weights cannot be synced in place")
        at, part = source.storage_offset(), []
        for size, stride in zip(source.shape, source.stride(), strict=True):
            part.append((at // stride, at // stride + size))
            at %= stride
        low = view.dtype != torch.float32 and view.ndim == 2 and self._residual
        return Block(tuple(part), owner[0], view, torch.zeros_like(view) if low else None)

    def check(self, update: Update) -> None:
        """Raise UserError where an update does not fit these weights: before any of them is touched."""
        if self.broken:
            raise UserError(f"the weights are of no version since an update failed half-way: {self.broken}")
        if update.base != self.version:
            raise UserError(
                f"the weights are at version {self.version}, the update goes from {update.base} to {update.version}"
            )
        owners = dict(self.model.named_parameters())
        for kind, arrays in (("factor", update.factors), ("value", update.dense)):
            for name, array in arrays.items():
                if name not in self._shapes:
                    raise UserError(f"{name}: updates of this weight were not announced")
                shape = self._shapes[name]
                if tuple(array.shape) != shape if kind == "value" else (len(shape) != 2 or array.shape[1] != shape[0]):
                    raise UserError(f"{name}: a {kind} of shape {array.shape} does not fit a weight of shape {shape}")
                if not all(_holds(owners.get(block.parameter), block.view) for block in self.blocks[name]):
                    raise UserError(f"{name}: its parameter was replaced since the server was told what to expect")

    def apply(self, update: Update, digest: str) -> bool:
        """Bring the weights to the update's version; False if it is the one they have had last.

        Raises:
          UserError: see `check`.
        """
        if not self.broken and (update.version, digest) == (self.version, self.digest):
            return False
        self.check(update)
        try:
            with torch.no_grad():
                for name, factor in update.factors.items():
                    for block in self.blocks[name]:
                        self._add(block, name, factor, update)
                for name, value in update.dense.items():
                    for block in self.blocks[name]:
                        part = value[tuple(slice(*ends) for ends in block.part)]
                        block.view.copy_(_tensor(part))
                        if block.residual is not None:
                            block.residual.zero_()
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # or what fails there would fail a later request
        except BaseException as error:
            self.broken = repr(error)
            raise
        self.version, self.digest = update.version, digest
        return True

    def _add(self, block: Block, name: str, factor: Any, update: Update) -> None:
        view, (rows, columns) = block.view, block.part
        r, k = factor.shape[0], self._shapes[name][1]
        drawn = twin.signs(update.seed, update.drawn, name, r, k, columns, torch, view.device)
        # Products of a bfloat16 factor with signs are exact, in TF32 too.
        d = _tensor(factor[:, slice(*rows)]).to(view.device).float()
        value = view.float()  # the view itself where it is float32
        if block.residual is not None:
            value += block.residual
        value.mul_(1 - update.decay).addmm_(d.T, drawn.float(), alpha=r**-0.5)
        if view.dtype != torch.float32:
            view.copy_(value)
        if block.residual is not None:
            block.residual.copy_(value - view.float())


def _tensor(array: Any) -> torch.Tensor:
    """A copy of an array of `blob.decode`; uint16 ones hold the bits of bfloat16."""
    if array.dtype.name == "uint16":
        return torch.tensor(array.view("int16")).view(torch.bfloat16)
    return torch.tensor(array)


class _Copies(TorchDispatchMode):
    """Notes copies of tensors without values instead of making them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].device.type == "meta" and args[0].device.type != "meta":
            self.seen.append((args[0], args[1]))
            return args[0]
        return func(*args, **(kwargs or {}))


def _holds(parameter: torch.Tensor | None, view: torch.Tensor) -> bool:
    """Whether the view looks into the parameter."""
    return parameter is not None and parameter.untyped_storage().data_ptr() == view.untyped_storage().data_ptr() != 0
