"""The sizes of a model, and what follows from them: parameters, cache, operations."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts in the layers that have one."""

    count: int
    per_token: int
    """Experts that each token goes through, without the shared ones."""
    intermediate: int
    """The inner size of an expert."""
    shared_intermediate: int = 0
    """The inner sizes of the shared experts together; 0 for none."""
    dense_layers: int = 0
    """Layers without experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): what is cached is a compressed vector that all heads share."""

    query_rank: int
    """Size of the compressed query; 0 where queries are not compressed."""
    kv_rank: int
    rope_dim: int
    """The part of a head that is rotated."""
    nope_dim: int
    """The part of a query's head that is not."""
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder."""

    name: str
    layers: int
    hidden: int
    heads: int
    """Query heads."""
    kv_heads: int
    head_dim: int
    intermediate: int
    """The inner size of the feed-forward part of a layer without experts."""
    vocab: int
    tied: bool
    """Whether the embedding is the output head too."""
    qkv_bias: bool = False
    qk_norm: bool = False
    context: int = 32_768
    """The longest sequence, in tokens."""
    experts: Experts | None = None
    latent: Latent | None = None

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention."""
        if (latent := self.latent) is not None:
            head = latent.nope_dim + latent.rope_dim
            query = self.heads * head * (latent.query_rank or self.hidden) + self.hidden * latent.query_rank
            down = self.hidden * (latent.kv_rank + latent.rope_dim)
            up = latent.kv_rank * self.heads * (latent.nope_dim + latent.value_dim)
            return query + down + up + self.heads * latent.value_dim * self.hidden + latent.query_rank + latent.kv_rank
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (query + 2 * kv) + query * self.hidden
        return weights + (query + 2 * kv) * self.qkv_bias + 2 * self.head_dim * self.qk_norm

    @property
    def dense_layers(self) -> int:
        """Layers without experts."""
        return self.layers if self.experts is None else self.experts.dense_layers

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers

    @property
    def feed_forward_parameters(self) -> int:
        """Parameters of the feed-forward parts of all layers."""
        dense = self.dense_layers * 3 * self.hidden * self.intermediate
        if (experts := self.experts) is None:
            return dense
        inner = experts.count * experts.intermediate + experts.shared_intermediate
        return dense + self.expert_layers * self.hidden * (3 * inner + experts.count)

    @property
    def parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        layers = self.layers * (self.attention_parameters + 2 * self.hidden)
        return embeddings + layers + self.feed_forward_parameters + self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head."""
        return self.vocab * self.hidden

    def cache_bytes(self, *, tp: int = 1, element_bytes: float = 2.0) -> float:
        """Bytes of keys and values of one token on one rank. Ranks beyond the KV heads keep copies of these."""
        if self.latent is not None:
            return self.layers * (self.latent.kv_rank + self.latent.rope_dim) * element_bytes
        return 2 * self.layers * -(-self.kv_heads // tp) * self.head_dim * element_bytes
