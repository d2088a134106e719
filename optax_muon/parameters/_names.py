"""The words of a path, and the rows of the tables that match them."""

import dataclasses
import itertools
import re
from functools import cached_property, lru_cache

_WEIGHT = re.compile(r"(?:\w+_)?kernel|weights?|w|W")
_WRAPPERS = {"params", "model", "module", "net", "network", "transformer", "lm"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a routing table. Every pattern matches whole components, case folded, numbering removed.

    Attributes:
        rule: the name that `describe` shows.
        role: what the leaf is; only 'hidden' gets Muon.
        because: the reason that `describe` shows.
        subject: the module of a kernel, or the leaf itself when it is a raw array.
        leaf: the last component, numbering kept.
        parent: the component before the leaf.
        above: some component before the subject.
        not_above: no component before the subject may match, nor the subject itself.
        beside: some sibling of the subject.
        root: the subject stands at the root of the model and belongs to no attention.
        raw: True for raw arrays only, False for kernels inside a module only.
        min_ndim: the least rank.
        auto: the subject has the name that Linen gives by itself, such as Dense_0.
        layouts: the layouts that the name allows, best first; () when it says nothing about them.
        sure: the name alone is enough from rank 3 on; else something beside the leaf must agree.
        partner: (name, layouts) of the matrix that maps back, for instance the output of a query.
    """

    rule: str
    role: str
    because: str
    subject: str | None = None
    leaf: str | None = None
    parent: str | None = None
    above: str | None = None
    not_above: str | None = None
    beside: str | None = None
    root: bool = False
    raw: bool | None = None
    min_ndim: int = 0
    auto: bool = False
    layouts: tuple[str, ...] = ()
    sure: bool = True
    partner: tuple[str, tuple[str, ...]] | None = None

    def matches(self, name: "Names", ndim: int, siblings: tuple[str, ...]) -> bool:
        if ndim < self.min_ndim or (self.raw is not None and self.raw == name.is_weight):
            return False
        if self.subject is not None and not fullmatch(self.subject, name.subject):
            return False
        if self.leaf is not None and not fullmatch(self.leaf, name.leaf):
            return False
        if self.parent is not None and not fullmatch(self.parent, name.parent):
            return False
        if self.above is not None and not any(fullmatch(self.above, c) for c in name.above):
            return False
        if self.not_above is not None and any(
            fullmatch(self.not_above, c) for c in (*name.above, name.subject)
        ):
            return False
        if self.beside is not None and not any(fullmatch(self.beside, plain(s)) for s in siblings):
            return False
        return (not self.root or name.at_root) and (not self.auto or name.auto)


@dataclasses.dataclass(frozen=True)
class Names:
    """The components of a path, as they are and folded."""

    raw: tuple[str, ...]

    @cached_property
    def folded(self) -> tuple[str, ...]:
        return tuple(plain(c) for c in self.raw if c not in ("~", "params"))

    @property
    def leaf(self) -> str:
        """The last component in lower case with its number."""
        return snake(self.raw[-1]) if self.raw else ""

    @property
    def parent(self) -> str:
        return self.folded[-2] if len(self.folded) > 1 else ""

    @property
    def is_weight(self) -> bool:
        """Whether the last component only says "the matrix of the module above"."""
        return bool(self.raw) and _WEIGHT.fullmatch(self.raw[-1]) is not None

    @property
    def _position(self) -> int:
        return max(len(self.folded) - (2 if self.is_weight else 1), 0)

    @property
    def subject(self) -> str:
        return self.folded[self._position] if self.folded else ""

    @property
    def above(self) -> tuple[str, ...]:
        return self.folded[: self._position]

    @property
    def at_root(self) -> bool:
        return all(c in _WRAPPERS for c in self.above)

    @property
    def auto(self) -> bool:
        """Whether Linen named the subject."""
        raw = self.raw[-2 if self.is_weight and len(self.raw) > 1 else -1]
        return re.fullmatch(r"[A-Z]\w*_\d+", raw) is not None

    @property
    def lifted(self) -> int:
        """Number of Linen's automatic names of lifted classes: ScanBlock_0, VmapDense_0."""
        return sum(bool(re.match(r"(Scan|Vmap)[A-Z]", c)) for c in self.raw)

    @property
    def in_stack(self) -> bool:
        """Whether a container named like a stack holds its layers in the arrays, not in a list."""
        words = ("layers", "blocks", "h", "stack", "scan", "scanned")
        return any(snake(a) in words and not b.isdigit() for a, b in itertools.pairwise(self.raw))


def fullmatch(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text) is not None


@lru_cache(maxsize=4096)
def snake(component: str) -> str:
    """MultiHeadAttention_0 -> multi_head_attention_0."""
    component = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", component)
    return re.sub(r"_+", "_", component).lower()


@lru_cache(maxsize=4096)
def plain(component: str) -> str:
    """A component in snake case without its numbering: LayerNorm_0 -> layer_norm, fc1 -> fc; w1 stays."""
    component = snake(component)
    shorter = re.sub(r"_\d+$", "", component)
    without = re.sub(r"(?<=[a-z][a-z])\d+$", "", shorter)
    return without or component
