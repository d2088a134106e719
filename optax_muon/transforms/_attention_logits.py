"""The largest attention logit of each head: what QK-clip looks at."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def max_attention_logits(
    query: Float[Array, "*batch time heads width"],
    key: Float[Array, "*batch source groups width"],
    *,
    causal: bool = False,
    mask: Bool[Array, "..."] | None = None,
    scale: float | None = None,
    query_block: int | None = None,
) -> Float[Array, "heads"]:
    r"""The maximum over batch and positions of each head's logits before the softmax.

    Formula: `S_h = max over b, i, j of scale q_bih . k_bjh`, over the pairs (i, j) that the mask admits.

    Args:
      query: as they meet the keys (after rotary embedding and biases), not scaled.
      key: the same; fewer heads are shared by consecutive groups of query heads.
      causal: whether position i sees only j <= i + (source - time), the last query being at the last key.
      mask: boolean, broadcastable to [*batch, heads, time, source]; True where a pair takes part.
      scale: of the logits; None for 1 / sqrt(width).
      query_block: number of query positions at a time, to bound memory; None for all. It must divide their
        number.

    Returns:
      float32 (float64 for float64 inputs) [heads]. A head without any admitted pair has -inf, which `qk_clip`
      leaves alone. No gradient flows through it. Under `pmap` or `shard_map` over the batch, take
      `jax.lax.pmax` of it.

    Raises:
      ValueError: shapes that do not fit together.

    Example:
      >>> query = jnp.array([[[1.0]], [[3.0]]])       # two positions, one head of width 1
      >>> key = jnp.array([[[2.0]], [[5.0]]])
      >>> max_attention_logits(query, key).tolist()
      [15.0]

    Note:
      It repeats the product of queries and keys, which fused attention kernels do not give out.

    References:
      Kimi K2, arXiv 2507.20534, section 2.1.
    """
    heads, groups = query.shape[-2], key.shape[-2]
    if groups == 0 or heads % groups:
        raise ValueError(f"max_attention_logits: {heads} query heads cannot share {groups} key heads evenly.")
    dtype = jnp.promote_types(jnp.float32, jnp.promote_types(query.dtype, key.dtype))
    query, key = (jax.lax.stop_gradient(x).astype(dtype) for x in (query, key))
    time, source, width = query.shape[-3], key.shape[-3], query.shape[-1]
    block = time if query_block is None else query_block
    if block < 1 or time % block:
        raise ValueError(
            f"max_attention_logits: query_block={query_block} does not divide the {time} query positions."
        )
    shape = (*query.shape[:-3], heads, time, source)
    sides = () if mask is None else zip(reversed(mask.shape), reversed(shape), strict=False)
    if mask is not None and (mask.ndim > len(shape) or any(n not in (1, side) for n, side in sides)):
        raise ValueError(
            f"max_attention_logits: mask has shape {mask.shape}, which does not broadcast to {shape}."
        )
    query = (width**-0.5 if scale is None else scale) * query.reshape(
        *query.shape[:-2], groups, heads // groups, width
    )

    def block_max(start: Array | int) -> Float[Array, "heads"]:
        part = jax.lax.dynamic_slice_in_dim(query, start, block, query.ndim - 4)
        logits = jnp.einsum("...tgrd,...sgd->...grts", part, key, precision="highest")
        logits = logits.reshape(*logits.shape[:-4], heads, block, source)
        if causal:
            seen = jnp.arange(source) <= jnp.arange(block)[:, None] + start + (source - time)
            logits = jnp.where(seen, logits, -jnp.inf)
        if mask is not None:
            whole = mask.ndim < 2 or mask.shape[-2] == 1
            admitted = mask if whole else jax.lax.dynamic_slice_in_dim(mask, start, block, mask.ndim - 2)
            logits = jnp.where(admitted, logits, -jnp.inf)
        heads_last = jnp.moveaxis(logits, -3, -1)
        return jnp.max(heads_last.reshape(-1, heads), axis=0, initial=-jnp.inf)

    if block == time:
        return block_max(0)
    return jnp.max(jax.lax.map(block_max, jnp.arange(0, time, block)), axis=0)
