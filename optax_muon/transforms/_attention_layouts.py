"""How attentions store query and key weights, and which of their entries belong to which head."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from optax_muon.parameters import Decision
from optax_muon.transforms._per_matrix import rows_and_columns

QUERY = ("query", "query_proj", "q_proj", "q", "wq", "to_q", "query_projection", "q_einsum", "linear_q")
KEY = ("key", "key_proj", "k_proj", "k", "wk", "to_k", "key_projection", "k_einsum", "linear_k")
LATENT_QUERY = ("q_up", "q_b_proj", "query_up", "wq_b", *QUERY)
LATENT_KEY = ("kv_up", "kv_b_proj", "key_value_up", "wkv_b")
FUSED = ("qkv", "qkv_proj", "c_attn", "query_key_value", "in_proj", "wqkv", "to_qkv", "qkv_einsum")
_QUERY_NORMS = (
    "query_ln",
    "query_norm",
    "q_norm",
    "q_ln",
    "q_layernorm",
    "norm_q",
    "query_layernorm",
    "ln_q",
)
_KEY_NORMS = ("key_ln", "key_norm", "k_norm", "k_ln", "k_layernorm", "norm_k", "key_layernorm", "ln_k")
_WEIGHTS = ("kernel", "weight", "w", "embedding")
_BIASES = ("bias", "b")
_GAINS = ("scale", "weight", "gain", "gamma", "bias", "b")

# For each position along the (flattened) outputs of a weight: its head, and the power of gamma that it is
# scaled by.
Positions = tuple[np.ndarray, np.ndarray]


def _per_head(heads: int, *parts: tuple[int, float]) -> Positions:
    """Heads one after the other, each made of parts (width, power)."""
    width = sum(n for n, _ in parts)
    powers = np.concatenate([np.full(n, power, np.float32) for n, power in parts])
    return np.repeat(np.arange(heads), width), np.tile(powers, heads)


@dataclasses.dataclass(frozen=True)
class AttentionLayout:
    """What `qk_clip` knows about the attentions of a model; see its three subclasses."""

    def names(self) -> dict[str, tuple[str, ...]]:
        """The names that the weights of each role may have."""
        raise NotImplementedError

    def positions(self, role: str, outputs: dict[str, int], heads: int) -> Positions:
        """Head and power of each output of a weight; ValueError with the reason where they do not fit."""
        raise NotImplementedError

    def head_sides(self, outputs: dict[str, int], heads: int) -> tuple[int, int]:
        """Width of a head and number of key heads; ValueError with the reason where they do not divide."""
        raise NotImplementedError

    def powers(self, shared: bool) -> tuple[float, float]:
        """The powers of gamma that queries and keys take; shared: a key head serves several query heads."""
        return (1.0, 0.0) if shared else (0.5, 0.5)

    def describe(self) -> str:
        """The names looked for, for a message."""
        return " and ".join(f"one of {', '.join(names)} ({role})" for role, names in self.names().items())


@dataclasses.dataclass(frozen=True)
class MultiHead(AttentionLayout):
    """Queries and keys as weights of their own, heads side by side: MHA, and GQA with fewer key heads.

    Args:
      query: names of the query weights, as components of a path.
      key: names of the key weights.
      query_power: the power of gamma that queries take; keys take 1 minus it. None for 1/2 in MHA and 1 in
        GQA, where keys are shared and any other would couple the heads of a group. With 1, keys need not be
        found.

    Example:
      >>> MultiHead(query=("my_q",), key=("my_k",)).query_power is None
      True
    """

    query: tuple[str, ...] = QUERY
    key: tuple[str, ...] = KEY
    query_power: float | None = None

    def names(self) -> dict[str, tuple[str, ...]]:
        """The names that the weights of each role may have."""
        return {"query": self.query} if self.query_power == 1 else {"query": self.query, "key": self.key}

    def head_sides(self, outputs: dict[str, int], heads: int) -> tuple[int, int]:
        """Width of a head and number of key heads."""
        if heads < 1 or outputs["query"] % heads:
            raise ValueError(f"{heads} heads do not divide its {outputs['query']} query outputs")
        width = outputs["query"] // heads
        key_heads, rest = divmod(outputs.get("key", outputs["query"]), width)
        if rest or not key_heads or heads % key_heads:
            raise ValueError(
                f"{heads} query heads of width {width} cannot share its {outputs['key']} key outputs evenly"
            )
        return width, key_heads

    def powers(self, shared: bool) -> tuple[float, float]:
        """The powers of gamma that queries and keys take."""
        if self.query_power is None:
            return super().powers(shared)
        if shared and self.query_power != 1:
            raise ValueError(
                f"its keys are shared by groups of query heads, so query_power={self.query_power} would "
                f"scale the other heads of a group too; leave it out"
            )
        return self.query_power, 1 - self.query_power

    def positions(self, role: str, outputs: dict[str, int], heads: int) -> Positions:
        """Head and power of each output of a weight."""
        width, key_heads = self.head_sides(outputs, heads)
        query, key = self.powers(key_heads != heads)
        return _per_head(heads, (width, query)) if role == "query" else _per_head(key_heads, (width, key))


@dataclasses.dataclass(frozen=True)
class MultiLatent(AttentionLayout):
    """Multi-head latent attention: per head `[nope | rope]` in the query weights, `[nope | value]` in the
    up-projection.

    Args:
      nope: width of a head's part without position.
      rope: width of a head's rotary part; its key is shared by all heads and never touched.
      value: width of a head's values beside its keys in the up-projection; 0 where keys have a weight of
        their own.
      query: names of the weights that give the queries (the up-projection where queries are compressed).
      key_value: names of the up-projections of keys.

    Example:
      >>> MultiLatent(nope=128, rope=64, value=128).rope
      64
    """

    nope: int
    rope: int
    value: int
    query: tuple[str, ...] = LATENT_QUERY
    key_value: tuple[str, ...] = LATENT_KEY

    def __post_init__(self) -> None:
        for name in ("nope", "rope", "value"):
            width = getattr(self, name)
            if not isinstance(width, int) or isinstance(width, bool) or width < (1 if name == "nope" else 0):
                raise ValueError(f"MultiLatent: {name}={width!r}; give the width of that part of one head.")

    def names(self) -> dict[str, tuple[str, ...]]:
        """The names that the weights of each role may have."""
        return {"query": self.query, "key": self.key_value}

    def positions(self, role: str, outputs: dict[str, int], heads: int) -> Positions:
        """Head and power of each output of a weight."""
        second = (self.rope, 1.0) if role == "query" else (self.value, 0.0)
        width = self.nope + second[0]
        if outputs[role] != heads * width:
            parts = "nope + rope" if role == "query" else "nope + value"
            raise ValueError(
                f"{heads} heads of {parts} = {width} make {heads * width} {role} outputs, not {outputs[role]}"
            )
        return _per_head(heads, (self.nope, 0.5), second)


@dataclasses.dataclass(frozen=True)
class FusedHeads(AttentionLayout):
    """Queries, keys and values in one weight.

    Args:
      key_heads: number of key (and value) heads; None for as many as query heads.
      grouped: False for `[all q | all k | all v]`, True for `[q .. q | k | v]` once per key head.
      fused: names of the fused weights.

    Example:
      >>> FusedHeads(key_heads=2, grouped=True).grouped
      True
    """

    key_heads: int | None = None
    grouped: bool = False
    fused: tuple[str, ...] = FUSED

    def names(self) -> dict[str, tuple[str, ...]]:
        """The names that the weights of each role may have."""
        return {"fused": self.fused}

    def head_sides(self, outputs: dict[str, int], heads: int) -> tuple[int, int]:
        """Width of a head and number of key heads."""
        groups = heads if self.key_heads is None else self.key_heads
        if groups < 1 or heads < 1 or heads % groups:
            raise ValueError(f"{heads} query heads cannot share {groups} key heads evenly")
        width, rest = divmod(outputs["fused"], heads + 2 * groups)
        if rest:
            raise ValueError(
                f"{heads} query and {groups} key and value heads do not divide its {outputs['fused']} outputs"
            )
        return width, groups

    def positions(self, role: str, outputs: dict[str, int], heads: int) -> Positions:
        """Head and power of each output of a weight."""
        width, groups = self.head_sides(outputs, heads)
        query, key = self.powers(groups != heads)
        head, power = _per_head(heads, (width, query))
        key_head, key_power = _per_head(groups, (width, key))
        parts = [(head, power), (key_head, key_power), (key_head, 0 * key_power)]
        if self.grouped:
            parts = [(a.reshape(groups, -1), b.reshape(groups, -1)) for a, b in parts]
        return tuple(np.concatenate([p[i] for p in parts], -1).ravel() for i in (0, 1))  # pyright: ignore[reportReturnType]


@dataclasses.dataclass(frozen=True)
class Member:
    """A leaf of an attention: what it serves, and whether it is a kernel, a bias or a gain."""

    index: int
    role: str
    kind: str


@dataclasses.dataclass(frozen=True)
class Attention:
    """The leaves of one attention (or of a stack of them) that QK-clip may scale."""

    path: str
    layout: AttentionLayout
    members: tuple[Member, ...]
    norms: tuple[Member, ...]

    def scalings(
        self, decisions: Sequence[Decision], logits: tuple[int, ...]
    ) -> Iterator[tuple[int, np.ndarray | None, Any, tuple[int, ...]]]:
        """(leaf, head of each position or None for all, power of each, axes of stack and positions)."""
        axes = {m.role: self._axes(decisions[m.index], logits) for m in self.members if m.kind == "kernel"}
        outputs = {
            role: math.prod(decisions[self._kernel(role)].shape[a] for a in axis[len(logits) - 1 :])
            for role, axis in axes.items()
        }
        try:
            if self.norms:
                yield from self._gains(decisions, logits, outputs)
                return
            for member in self.members:
                heads, powers = self.layout.positions(member.role, outputs, logits[-1])
                if not powers.any():
                    continue
                at = axes[member.role]
                if member.kind == "bias":
                    kernel = decisions[self._kernel(member.role)]
                    at = self._axes_of_bias(decisions[member.index], kernel, at, len(logits) - 1)
                yield member.index, heads, powers, at
        except ValueError as error:
            raise ValueError(f"max_logits of `{self.path}` has shape {logits}: {error}.") from None

    def _kernel(self, role: str) -> int:
        return next(m.index for m in self.members if m.kind == "kernel" and m.role == role)

    def _axes(self, kernel: Decision, logits: tuple[int, ...]) -> tuple[int, ...]:
        """The axes of a kernel: those of the stack, then its outputs in the order they are stored."""
        if kernel.view is None:
            raise ValueError(
                f"`{kernel.path}` has no matrix view ({kernel.because}), so its output axes are unknown. "
                f"Give one in rules=."
            )
        batch = kernel.view.batch_axes(len(kernel.shape))
        stack = tuple(kernel.shape[a] for a in batch)
        if stack != logits[:-1] or not logits:
            expected = ", ".join([*map(str, stack), "heads"])
            raise ValueError(
                f"max_logits of `{self.path}` has shape {logits}, but `{kernel.path}` {kernel.shape} is a "
                f"stack of {stack or 'no'} matrices, so it must be ({expected}). Heads must be an output "
                f"axis of the view, not a batch axis: {kernel.view}."
            )
        return (*batch, *sorted(rows_and_columns(kernel.view)[1]))

    def _axes_of_bias(
        self, bias: Decision, kernel: Decision, axes: tuple[int, ...], stack: int
    ) -> tuple[int, ...]:
        """The axes of a bias that correspond to those of its kernel.

        A lifted scan puts the layer axis of both at the same index; stacks made otherwise keep the kernel's
        order.
        """
        sides = [kernel.shape[a] for a in axes]
        at_same_index = list(range(stack, len(axes)))
        for layer in sorted(range(stack), key=lambda i: axes[i]):
            at_same_index.insert(min(axes[layer], len(at_same_index)), layer)
        in_kernel_order = sorted(range(len(axes)), key=lambda i: axes[i])
        for order in (at_same_index, in_kernel_order):
            if tuple(sides[i] for i in order) == bias.shape:
                return tuple(order.index(i) for i in range(len(axes)))
        raise ValueError(
            f"`{bias.path}` {bias.shape} does not fit the outputs of `{kernel.path}` {kernel.shape}"
        )

    def _gains(
        self, decisions: Sequence[Decision], logits: tuple[int, ...], outputs: dict[str, int]
    ) -> Iterator[tuple[int, np.ndarray | None, Any, tuple[int, ...]]]:
        """Scalings of the gains of query and key norms, shared by all heads or one per head."""
        heads, stack = logits[-1], len(logits) - 1
        width, key_heads = self.layout.head_sides(outputs, heads)
        of_role = {"query": heads, "key": key_heads}
        roles = {m.role for m in self.norms}
        per_head = {m.index: len(decisions[m.index].shape) == stack + 2 for m in self.norms}
        shared = any(per_head.values()) and key_heads != heads
        query_power, key_power = self.layout.powers(shared)
        for member in self.norms:
            gain = decisions[member.index]
            outer = (of_role[member.role],) if per_head[member.index] else ()
            if gain.shape != (*logits[:-1], *outer, width):
                raise ValueError(
                    f"the gain `{gain.path}` has shape {gain.shape}, not {(*logits[:-1], width)} (shared by "
                    f"the heads) or {(*logits[:-1], of_role[member.role], width)}"
                )
            power = (query_power if member.role == "query" else key_power) if len(roles) == 2 else 1.0
            if not power:
                continue
            if not outer:
                yield member.index, None, power, tuple(range(stack + 1))
            else:
                yield member.index, np.repeat(np.arange(outer[0]), width), power, tuple(range(stack + 2))


def find_attentions(decisions: Sequence[Decision], layout: AttentionLayout) -> list[Attention]:
    """The attentions of a model: parents of weights that have the names of all roles of the layout."""
    role_of = {name: role for role, names in layout.names().items() for name in names}
    norm_of = {}
    if not isinstance(layout, MultiLatent):
        norm_of = {**dict.fromkeys(_QUERY_NORMS, "query"), **dict.fromkeys(_KEY_NORMS, "key")}
    members: dict[str, list[Member]] = {}
    norms: dict[str, list[Member]] = {}
    strangers: dict[str, str] = {}
    for index, decision in enumerate(decisions):
        parts = decision.path.split("/")
        for at, name in itertools.islice(enumerate(parts), max(0, len(parts) - 3), None):
            parent, below = "/".join(parts[:at]), parts[at + 1 :]
            if name in norm_of and len(below) == 1 and below[0] in _GAINS:
                norms.setdefault(parent, []).append(Member(index, norm_of[name], "gain"))
            elif name in role_of:
                kind = _kind(below)
                if kind is None:
                    strangers[parent] = decision.path
                else:
                    members.setdefault(parent, []).append(Member(index, role_of[name], kind))
    found = []
    for parent, leaves in members.items():
        if {m.role for m in leaves if m.kind == "kernel"} != set(layout.names()):
            continue
        if parent in strangers:
            raise ValueError(
                f"`{strangers[parent]}` is neither a kernel nor a bias, but takes part in the queries or "
                f"keys of `{parent}`, so scaling the kernel would not scale the logits. Merge adapters into "
                f"their weight before qk_clip."
            )
        found.append(Attention(parent, layout, tuple(leaves), tuple(norms.get(parent, ()))))
    return found


def _kind(below: Sequence[str]) -> str | None:
    """What a leaf is, from the part of its path below the name of its role."""
    if not below or (len(below) == 1 and below[0] in _WEIGHTS):
        return "kernel"
    return "bias" if len(below) == 1 and below[0] in _BIASES else None
