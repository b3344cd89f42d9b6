"""Kernels for decoding over long KV caches: one op per folder, each with a plain-jnp reference and a GPU kernel.

Letters used throughout: B batch, T query rows, S cache capacity, M index-buffer width, N query heads, K kv heads,
G = N / K, H head dim. Query head n reads kv head n // G. A cache row is visible to a query iff 0 <= row <= position.
"""

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.attention_scores import attention_scores
from pallas_kernels.attention_step import cached_step, sparse_step
from pallas_kernels.cached_attention import cached_attention
from pallas_kernels.prefix_attention import prefix_attention
from pallas_kernels.rope_and_cache import rope_and_cache
from pallas_kernels.row_selection import row_selection
from pallas_kernels.skinny_matmul import gated_matmul, skinny_matmul
from pallas_kernels.sparse_attention import sparse_attention

__all__ = [
    "add_rms_norm",
    "attention_scores",
    "cached_attention",
    "cached_step",
    "gated_matmul",
    "prefix_attention",
    "rope_and_cache",
    "row_selection",
    "skinny_matmul",
    "sparse_attention",
    "sparse_step",
]
