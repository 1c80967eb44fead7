"""`CausalLM`: a decoder as a hashable handle with pure functions of a parameter tree.

Parameters are a plain nested dict of arrays, stacked over layers on axis 0 (`layers/mlp/up_proj/kernel` is
`[layers, in, out]`). The handle holds no array, so it can be a static argument of `jax.jit`.
"""

import dataclasses
from dataclasses import dataclass
from functools import cache as memo
from functools import partial
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from logra_jax._shapes import Array, Bool, Float, Int
from logra_jax.errors import UserError
from logra_jax.mesh import constrain
from logra_jax.models.block import DecoderLayer
from logra_jax.models.cache import Cache, LayerCache
from logra_jax.models.config import ModelConfig
from logra_jax.models.flash import Front
from logra_jax.models.layers import Embedding, Linear, RMSNorm, Rope, Sight, positions_within, rope_angles
from logra_jax.models.names import name_table
from logra_jax.models.remat import LAYER_INPUT, REMAT, rematerialized

Params = dict[str, Any]
Ids = Int[Array | np.ndarray, "batch time"]
Mask = Int[Array | np.ndarray, "batch time"] | Bool[Array | np.ndarray, "batch time"]
State = tuple[jax.Array, LayerCache | None]  # activations, and where there is a cache, its part of the layers' loop
DTYPES = ("float32", "bfloat16")

# On a CPU the loop over layers costs about a seventh of a gradient, so a short stack is unrolled there.
UNROLLED_LAYERS_ON_CPU = 8


def check_dtype(name: str, value: Any) -> str:
    """The name of a dtype that weights and computation may have, or a UserError naming the setting `name`."""
    text = value if isinstance(value, str) else jnp.dtype(value).name
    if text not in DTYPES:
        raise UserError(f"{name} is {text!r}; choose {' or '.join(DTYPES)}")
    return text


# Both kinds of layers of a hybrid model keep their parameters under "layers"; this names the graph of the linear kind.
LINEAR_LAYERS = "linear_layers"


class _Parts(NamedTuple):
    """The static graphs of a model's modules, and shape and logical axes of each parameter by path."""

    graphs: dict[str, nnx.GraphDef]
    shapes: dict[str, tuple[int, ...]]
    axes: dict[str, tuple[str, ...]]


@memo
def _parts(config: ModelConfig, mesh: Mesh | None = None) -> _Parts:
    """Build the modules of `config` from shapes alone: nothing is allocated."""
    modules: dict[str, nnx.Module] = {
        "embed_tokens": Embedding(config.vocab_size, config.hidden_size, mesh),
        "layers": DecoderLayer(config, mesh),
        "norm": RMSNorm(config.hidden_size, config.rms_norm_eps, config.zero_centered_norms),
    }
    if config.linear_attention is not None:
        modules[LINEAR_LAYERS] = DecoderLayer(config, mesh, full=False)
    if not config.tie_word_embeddings:
        modules["lm_head"] = Linear(config.hidden_size, config.vocab_size, axes=("embed", "vocab"))
    parts, table = _Parts({}, {}, {}), name_table(config)
    for name, module in modules.items():
        parts.graphs[name], state = nnx.split(module)
        for path, leaf in nnx.to_flat_state(state):
            key = "/".join(["layers" if name == LINEAR_LAYERS else name, *map(str, path)])
            stack = table[key].stack
            parts.shapes[key] = stack + leaf.get_value().shape
            parts.axes[key] = ("layers",) * len(stack) + leaf.logical
    return parts


@dataclass(frozen=True)
class CausalLM:
    """A decoder without its weights: configuration, and how to compute with a parameter tree.

    compute_dtype: "float32" or "bfloat16", the activations' dtype; weights are cast to it where they are
        used, while softmax, norm statistics, rotary angles and logits stay in float32.
    remat: what the backward pass keeps of a layer's activations, the rest being computed again: see `models/remat.py`.
    attention: "blocked", for a block of queries at a time; or "cudnn", which passes without a cache then use:
        bfloat16 on NVIDIA GPUs, no forward mode, and real tokens next to each other in their row.
    scan_unroll: layers per turn of the layer loop; None unrolls short stacks on a CPU and nothing elsewhere.
    mesh: devices to compute on: rows are split over them, weights are put together layer by layer. None leaves
        the layout of everything to the compiler.
    source: the folder the weights came from, whose names, shards and side files `save_hf` keeps, or None.
    end_ids: every token id that ends a text; empty if the source names none. pad_id: the id to pad with.
    """

    config: ModelConfig
    compute_dtype: str = "float32"
    remat: str = "none"
    attention: str = "blocked"
    scan_unroll: int | None = None
    mesh: Mesh | None = None
    source: str | None = None
    end_ids: tuple[int, ...] = ()
    pad_id: int = 0

    def __post_init__(self) -> None:
        check_dtype("compute_dtype", self.compute_dtype)
        if self.remat not in REMAT:
            raise UserError(f"remat is {self.remat!r}; choose {', '.join(map(repr, REMAT))}")
        if self.attention not in ("blocked", "cudnn"):
            raise UserError(f"attention is {self.attention!r}; choose 'blocked' or 'cudnn'")
        if self.scan_unroll is not None and self.scan_unroll < 1:
            raise UserError(f"scan_unroll is {self.scan_unroll}; it counts layers and must be at least 1")

    def replace(self, **changes: Any) -> "CausalLM":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @overload
    def hidden(
        self, params: Params, input_ids: Any, attention_mask: Any = ..., *, segments: Any = ..., reach: int | None = ...
    ) -> jax.Array: ...
    @overload
    def hidden(
        self, params: Params, input_ids: Any, attention_mask: Any = ..., *, cache: Cache, reach: int | None = ...
    ) -> tuple[jax.Array, Cache]: ...
    def hidden(
        self,
        params: Params,
        input_ids: Ids,
        attention_mask: Mask | None = None,
        cache: Cache | None = None,
        segments: Int[Array, "batch time"] | None = None,
        reach: int | None = None,
    ) -> Any:
        """Hidden states after the final norm, `[batch, time, hidden]` in the compute dtype.

        attention_mask: 1 or True at real tokens (default: all are real); padding may be on either side and
            the states at padding mean nothing. A token's position is the number of real tokens before it.
        cache: keys and values of earlier tokens. The new tokens are written at slots `cache.slot` onwards,
            attend to all earlier valid slots, and the result is `(hidden, new cache)`. A single token attends to
            all valid slots: its own need not be the last of them.
        segments: for rows of several texts, instead of mask and cache: a number above 0 at the tokens of each text,
            which lie next to each other, and 0 at padding. Texts do not see each other, and each starts at position 0.
        reach: tokens of the longest text, if segments are given: attention then looks no further. With a cache, how
            many of its slots are looked at, the first of them; a cache in parts has to have a part that ends there.
        """
        batch, time = input_ids.shape
        if segments is not None:
            if attention_mask is not None or cache is not None:
                raise ValueError("segments stand for the attention mask, and rows of several texts have no cache")
            real = segments > 0
        elif attention_mask is None:
            real = jnp.ones((batch, time), jnp.bool_)
        else:
            real = jnp.asarray(attention_mask, jnp.bool_)
        front = Front(real) if self.attention == "cudnn" and cache is None and segments is None else None
        if front is not None:
            input_ids, real = front.move(jnp.asarray(input_ids)), front.real
        counted = jnp.cumsum(real.astype(jnp.int32), axis=1)
        if cache is None:
            offset, valid, kv = jnp.zeros((), jnp.int32), real, None
            positions = jnp.maximum(counted - 1, 0) if segments is None else positions_within(segments)
        else:
            slots, offset = cache.valid.shape[1], cache.slot
            if time > slots:
                raise ValueError(f"{time} new tokens do not fit a cache of {slots} slots")
            valid = jax.lax.dynamic_update_slice(cache.valid, real, (jnp.zeros_like(offset), offset))
            whole = valid
            positions = jnp.maximum(counted + cache.lengths[:, None] - 1, 0)
            first = jnp.zeros((), jnp.int32)
            hybrid = {} if cache.state is None else {"window": cache.window, "state": cache.state, "linear": first}
            kv = LayerCache(cache.k, cache.v, first, cache.slot, **hybrid)

        graphs = _parts(self.config, self.mesh).graphs
        x = nnx.merge(graphs["embed_tokens"], params["embed_tokens"])(jnp.asarray(input_ids), self.compute_dtype)
        if cache is not None and reach is not None:
            valid, reach = valid[:, :reach], None
        sight = Sight(valid, offset, segments, reach, lengths=None if front is None else front.lengths)
        x, kv = self._layers(params["layers"], x, positions, sight, kv)
        x = nnx.merge(graphs["norm"], params["norm"])(x)
        if cache is None or kv is None:
            return x if front is None else constrain(front.back(x), self.mesh, "batch", None, None)
        lengths, slot = cache.lengths + counted[:, -1], cache.slot + time
        return x, Cache(kv.k, kv.v, whole, lengths, slot, kv.window, kv.state)

    def _layers(
        self,
        params: Any,
        x: Float[Array, "batch time d"],
        positions: Int[Array, "batch time"],
        sight: Sight,
        kv: LayerCache | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Run the stacked layers; a leaf may be any pytree whose arrays are stacked alike.

        The loop is over groups of layers that end with full attention: one layer each, but in hybrid models.
        """
        graphs, every = _parts(self.config, self.mesh).graphs, self.config.full_attention_interval
        rope = rope_angles(positions, self.config, self.compute_dtype)
        if isinstance(params, tuple):
            return self._layers_apart(params, x, rope, sight, kv)
        groups, unroll = self._groups, self._unroll

        def layer(full: bool, carry: State, values: Params, at: tuple[Any, Any] | None = None) -> State:
            # A layer is cut out under the policy: what is cut out before would be kept for the backward pass, which
            # is a copy of all weights.
            own = values if at is None else _layer_of_group(values, full, at)
            module = nnx.merge(graphs["layers" if full else LINEAR_LAYERS], own)
            x, kv = module(checkpoint_name(carry[0], LAYER_INPUT), rope, sight, carry[1])
            if kv is not None:
                kv = kv._replace(layer=kv.layer + 1) if full else kv._replace(linear=kv.linear + 1)
            return x, kv

        full, linear = (rematerialized(partial(layer, kind), self.remat, looped=unroll == 1) for kind in (True, False))
        if self.config.linear_attention is None:
            carry, _ = jax.lax.scan(lambda carry, own: (full(carry, own), None), (x, kv), params, groups, unroll=unroll)
            return carry

        # A loop of its own, so that one layer after the other is computed again on the way back, not all of a group.
        # Whole stacks go into the loops: the part that belongs to a group would be a copy.
        def group(carry: State, number: Any) -> tuple[State, None]:
            one = lambda carry, place: (linear(carry, params, (number, place)), None)
            carry, _ = jax.lax.scan(one, carry, jnp.arange(every - 1), unroll=1 if unroll == 1 else every - 1)
            return full(carry, params, (number, jnp.int32(every - 1))), None

        carry, _ = jax.lax.scan(group, (x, kv), jnp.arange(groups), unroll=unroll)
        return carry

    def _layers_apart(
        self, layers: tuple[Params, ...], x: Float[Array, "batch time d"], rope: Rope, sight: Sight, kv: Any
    ) -> tuple[jax.Array, LayerCache | None]:
        """The layers one after the other, each with parameters and a cache of its own; see `apart`."""
        graphs, full_layers = _parts(self.config, self.mesh).graphs, set(self.config.full_layers)
        names = {True: ("k", "v"), False: ("window", "state")}
        stacks = {} if kv is None else {name: list(getattr(kv, name) or ()) for name in (*names[True], *names[False])}
        done = {True: 0, False: 0}
        for number, own in enumerate(layers):
            full = number in full_layers
            module, place = nnx.merge(graphs["layers" if full else LINEAR_LAYERS], own), done[full]
            one = kv and kv._replace(**{name: stacks[name][place] for name in names[full]}, layer=None, linear=None)
            x, one = module(x, rope, sight, one)
            for name in names[full] if one is not None else ():
                stacks[name][place] = getattr(one, name)
            done[full] += 1
        return x, kv and kv._replace(**{name: found or None for name, found in stacks.items()})

    @property
    def _groups(self) -> int:
        return self.config.num_hidden_layers // self.config.full_attention_interval

    @property
    def _unroll(self) -> int:
        """Groups of layers per turn of the layer loop."""
        short = jax.default_backend() == "cpu" and self.config.num_hidden_layers <= UNROLLED_LAYERS_ON_CPU
        return min(self.scan_unroll or (self._groups if short else 1), self._groups)

    @property
    def _written_out(self) -> bool:
        return self._unroll == self._groups

    def apart(self, params: Params) -> Params:
        """`params` with a tuple of layers for the stack of them, if the layer loop is written out; else unchanged.

        For programs with many passes of few tokens and nothing to differentiate, where cutting the layers out of the
        stacks would cost as much as what is done with them. The cache has to be `init_cache(..., apart=True)`.
        """
        every, count, stacked = self.config.full_attention_interval, self.config.num_hidden_layers, params["layers"]
        if not self._written_out:
            return params
        if self.config.linear_attention is None:
            layers = tuple(jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(count))
        else:
            full = set(self.config.full_layers)
            layers = tuple(_layer_of_group(stacked, i in full, divmod(i, every)) for i in range(count))
        return params | {"layers": layers}

    def logits(
        self,
        params: Params,
        input_ids: Ids,
        attention_mask: Mask | None = None,
    ) -> Float[Array, "batch time vocab"]:
        """Logits of the next token at every position, in float32. See `hidden` for the mask."""
        return project(self.hidden(params, input_ids, attention_mask), self.head(params))

    def head(self, params: Params) -> Any:
        """The output kernel `[hidden, vocab]` in its stored dtype: the transposed embedding where tied."""
        if self.config.tie_word_embeddings:
            return params["embed_tokens"]["embedding"].T
        return params["lm_head"]["kernel"]

    def init_cache(self, batch: int, length: int | tuple[int, ...], dtype: Any = None, apart: bool = False) -> Cache:
        """An empty cache of `length` slots, for prompt and new tokens; several lengths are those of its parts.

        dtype: by default compute_dtype; S of linear attention is float32 anyway. apart: for parameters that went
        through `apart`.
        """
        c, linear = self.config, self.config.linear_attention
        kept = jnp.dtype(self.compute_dtype if dtype is None else dtype)

        def zeros(count: int, *shape: int, axes: tuple[str | None, ...], kind: Any = kept) -> Any:
            if apart and self._written_out:
                return [constrain(jnp.zeros(shape, kind), self.mesh, *axes) for _ in range(count)]
            return constrain(jnp.zeros((count, *shape), kind), self.mesh, None, *axes)

        def keys() -> Any:
            one = partial(zeros, len(c.full_layers), axes=("batch", "kv_heads", None, None))
            shape = lambda slots: (batch, c.num_key_value_heads, slots, c.head_dim)
            if isinstance(length, int):
                return one(*shape(length))
            parts = [one(*shape(slots)) for slots in length]
            return [tuple(own) for own in zip(*parts, strict=True)] if isinstance(parts[0], list) else tuple(parts)

        cache = Cache(
            k=keys(),
            v=keys(),
            valid=jnp.zeros((batch, length if isinstance(length, int) else sum(length)), jnp.bool_),
            lengths=jnp.zeros((batch,), jnp.int32),
            slot=jnp.zeros((), jnp.int32),
        )
        if linear is None:
            return cache
        fill, heads = partial(zeros, len(c.linear_layers), batch), (linear.key_dim, linear.value_dim)
        return cache._replace(
            window=fill(linear.conv_width - 1, linear.channels, axes=("batch", None, "q_heads")),
            state=fill(linear.value_heads, *heads, axes=("batch", "q_heads", None, None), kind=jnp.float32),
        )

    def abstract_params(self, dtype: Any = "float32") -> Params:
        """Shapes of all parameters as `jax.ShapeDtypeStruct`s of that dtype."""
        kind = jnp.dtype(check_dtype("dtype", dtype))
        shapes = _parts(self.config).shapes
        return unflatten_dict({p: jax.ShapeDtypeStruct(shape, kind) for p, shape in shapes.items()}, sep="/")

    def logical_axes(self) -> Params:
        """The parameter tree with a tuple of logical axis names, one per dimension, for each array."""
        return unflatten_dict(_parts(self.config).axes, sep="/")

    def init_params(self, key: jax.Array, dtype: Any = "float32") -> Params:
        """Random parameters: norms 1, biases 0, all else normal with deviation `config.initializer_range`.

        Decay rates of gated delta layers are uniform in (0, 16), as in the model's own library.
        """
        leaves, structure = jax.tree.flatten_with_path(self.abstract_params(dtype))

        def draw(key: jax.Array, path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            name, owner = path[-1].key, path[-2].key
            if name == "scale" and self.config.zero_centered_norms and (len(path) == 2 or owner != "norm"):
                return jnp.zeros(leaf.shape, leaf.dtype)
            if name in ("scale", "dt_bias"):
                return jnp.ones(leaf.shape, leaf.dtype)
            if name == "bias":
                return jnp.zeros(leaf.shape, leaf.dtype)
            if name == "A_log":
                return jnp.log(jax.random.uniform(key, leaf.shape, minval=1e-3, maxval=16.0)).astype(leaf.dtype)
            wide = jax.random.normal(key, leaf.shape, jnp.float32) * self.config.initializer_range
            return wide.astype(leaf.dtype)

        keys = jax.random.split(key, len(leaves))
        drawn = [draw(key, path, leaf) for key, (path, leaf) in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, drawn)

    def weight_names(self) -> dict[str, tuple[str, ...]]:
        """Every parameter path -> its Hugging Face tensor names, one per layer for a stacked leaf."""
        return {path: name.names for path, name in name_table(self.config).items()}


def _layer_of_group(values: Params, full: bool, at: tuple[Any, Any]) -> Params:
    """The parameters of one layer, with full or linear attention: `at` is its group and its place there."""

    def cut(part: Any, *at: Any) -> Any:
        # Not `x[at]`: JAX cannot add what flows back through that to a ref.
        def one(x: Array) -> Array:
            inner = x.shape[len(at) :]
            return jax.lax.dynamic_slice(x, (*at, *(0 for _ in inner)), (*(1 for _ in at), *inner)).reshape(inner)

        return jax.tree.map(one, part)

    # A group has one layer with full attention, so those parameters are stacked over groups alone.
    mixer = {"self_attn": cut(values["self_attn"], at[0])} if full else {"linear_attn": cut(values["linear_attn"], *at)}
    return mixer | {name: cut(part, *at) for name, part in values.items() if name not in ("self_attn", "linear_attn")}


def project(hidden: Float[Array, "batch time d"], head: Any) -> Float[Array, "batch time vocab"]:
    """Logits in float32 from hidden states and an output kernel `[d, vocab]` (an array or a sketch slot)."""
    kernel = head.astype(hidden.dtype)
    if isinstance(kernel, jax.Array):
        return jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)
    return (hidden @ kernel).astype(jnp.float32)
