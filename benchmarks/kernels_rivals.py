"""What JAX and PyTorch offer for the same attention shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from kernels_timing import Run, loop, random, torch_time


def jax_attention(
    run: Run, q: jax.Array, group: int, sets: list[tuple], guess: float, prefill: bool, report: Callable
) -> None:
    """`jax.nn` with its backends, and JAX's own Pallas ops. Over a cache longer than the rows none honours causality
    among them."""
    batch, rows, heads, head_dim = q.shape
    causal = prefill and rows == sets[0][0].shape[1]
    options = {"scale": head_dim**-0.5, "is_causal": causal}
    note = ", not causal" if prefill and not causal else ""

    def step(implementation, q, k, v):
        return jax.nn.dot_product_attention(q, k, v, implementation=implementation, **options)

    names = ("xla",) if run.tiny else ("xla", "cudnn")
    for name in names:
        call = functools.partial(step, name)
        report(f"{name} (jax.nn){note}", lambda call=call: loop(call, q, sets, guess))
    if run.tiny:
        return
    if not prefill:
        # [B,T,K*G,H] and [B,T*G,K,H] differ in a transpose, which a caller that picks its layout would not pay.
        folded = random(11, (batch, rows * group, heads // group, head_dim))
        call = functools.partial(step, "cudnn")
        report("cudnn (jax.nn, group folded into rows)", lambda: loop(call, folded, sets, guess))
    if rows == 1:

        def gqa():
            from jax.experimental.pallas.ops.gpu import decode_attention

            call = functools.partial(decode_attention.gqa, sm_scale=head_dim**-0.5)
            return loop(lambda q, k, v: call(q, k, v).astype(q.dtype), q[:, 0], sets, guess)

        report("jax.experimental.pallas decode_attention.gqa", gqa)
    if causal:

        def mosaic():
            from jax.experimental.pallas.ops.gpu import attention_mgpu

            config = attention_mgpu.TuningConfig(block_q=128, block_kv=128, max_concurrent_steps=2, causal=True)
            return loop(lambda q, k, v: attention_mgpu.attention(q, k, v, config), q, sets, guess)

        report("jax.experimental.pallas attention_mgpu", mosaic)


def torch_attention(
    shape: tuple[int, ...],
    capacity: int,
    kv_heads: int,
    num_sets: int,
    prefill: bool,
    report: Callable,
    flex: bool,
) -> None:
    """PyTorch SDPA, in decode shapes with each group's heads folded into query rows, and FlexAttention."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    batch, rows, heads, head_dim = shape
    new = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    sets = [tuple(new(batch, capacity, kv_heads, head_dim).transpose(1, 2) for _ in range(2)) for _ in range(num_sets)]
    q = new(batch, rows, heads, head_dim).transpose(1, 2)
    folded = new(batch, rows * (heads // kv_heads), kv_heads, head_dim).transpose(1, 2)

    def timed(backend, query, **options):
        with sdpa_kernel(backend):
            return torch_time(lambda k, v: scaled_dot_product_attention(query, k, v, **options), sets)

    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        if prefill:
            causal = {"enable_gqa": True, "is_causal": True}
            report(f"torch SDPA {name}, causal", lambda b=backend, c=causal: functools.partial(timed, b, q, **c))
        else:
            report(f"torch SDPA {name}, folded", lambda b=backend: functools.partial(timed, b, folded))

    def flex_time():
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled = torch.compile(flex_attention)
        mask = None
        if prefill:
            rule = lambda b, h, i, j: i >= j  # noqa: E731
            mask = create_block_mask(rule, None, None, rows, capacity, device="cuda")
        return torch_time(lambda k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True), sets)

    if flex:
        report("torch FlexAttention", lambda: flex_time)
