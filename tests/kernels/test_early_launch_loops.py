"""What launches early is read by kernels that wait before they read: decode loops compiled for an H200."""

import re
import struct
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from compile_for_h200 import compile_for_h200
from machine_code import usage

from jaxspec.decode import decode_all, prefill
from jaxspec.methods import DraftModel, Dustin, KnapSpec, Models, Plain, Quest, SelfDustin, Streaming, Vegas
from jaxspec.models import Decoder, ModelConfig, RopeConfig, init_cache, param_shapes
from jaxspec.planning import Plan
from jaxspec.requests import check_request
from jaxspec.sampling import Sampling
from jaxspec.types import Collect, LayerMask
from pallas_kernels import add_rms_norm
from pallas_kernels.dispatch import use_backend
from pallas_kernels.early_launch import AVAILABLE

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(not AVAILABLE, reason="kernels are launched one after the other before JAX 0.11"),
]

LAYERS, CONTEXT, NEW_TOKENS = 2, 8192, 64
# the sizes of Qwen2.5-1.5B and 0.5B, whose products of few rows are all kernels of ours
CONFIG = ModelConfig("qwen2", 4096, 1536, 8960, LAYERS, 12, 2, 128, 131072, RopeConfig(1e6), qkv_bias=True)
SMALL = ModelConfig("qwen2", 4096, 896, 4864, LAYERS, 14, 2, 64, 131072, RopeConfig(1e6), qkv_bias=True)
# and of the 7B, whose MLPs are XLA's
LARGE = ModelConfig("qwen2", 4096, 3584, 18944, LAYERS, 28, 4, 128, 131072, RopeConfig(1e6), qkv_bias=True)

LAUNCH, OURS = "griddepcontrol.launch_dependents", 'custom_call_target="__gpu$xla.gpu.triton"'
# These hand on an array and read nothing.
NO_READER = {"get-tuple-element", "bitcast", "tuple"}

# The step's kernel itself writes the cache, which XLA may read.
ATTENTION = {"add_rms_norm", "skinny_matmul", "cached_step_merge"}
PLAIN = ATTENTION | {"gated_matmul"}
VERIFY = {"add_rms_norm", "skinny_matmul", "gated_matmul", "cached_attention", "cached_attention_merge"}
SPARSE = VERIFY | {"sparse_step_merge"}
SPARSE_VERIFY = {"sparse_attention", "sparse_attention_merge"}
FULL_STEPS = VERIFY | PLAIN


class Instruction(NamedTuple):
    name: str
    opcode: str
    operands: list[str]
    root: bool
    line: str

    @property
    def ours(self) -> bool:
        return self.opcode == "custom-call" and OURS in self.line

    @property
    def kernel(self) -> str:
        return re.search(r'op_name="[^"]*?(\w+)/pallas_call', self.line)[1]


def instructions(hlo):
    found = []
    for line in hlo.split("\n"):
        match = re.match(r"\s+(ROOT )?%?([\w.-]+) = .*? ([\w-]+)\((.*?)\)", line)
        if match:
            root, name, opcode, operands = match.groups()
            found.append(Instruction(name, opcode, re.findall(r"%([\w.-]+)", operands), bool(root), line.strip()))
    return found


def readers(name, program):
    """The instructions that read what `name` writes, and those that hand it out of their computation."""
    for instruction in program:
        if name in instruction.operands:
            if instruction.opcode not in NO_READER or instruction.root:
                yield instruction
            if instruction.opcode in NO_READER:
                yield from readers(instruction.name, program)


def early_kernels(hlo):
    """Names of the kernels that launch early; all their results are read by kernels of ours, and by nothing else."""
    program = instructions(hlo)
    early = [i for i in program if i.ours and LAUNCH in i.line]
    for instruction in early:
        assert not instruction.root, instruction.kernel
        read_by = list(readers(instruction.name, program))
        assert read_by, instruction.kernel
        others = [reader.line[:300] for reader in read_by if not reader.ours]
        assert not others, (instruction.kernel, others)
    return {instruction.kernel for instruction in early}


# Of an instruction's 128 bits the first 12. Source: what nvdisasm prints for sm_90 as ACQBULK, PREEXIT, and LDG, LDGSTS
# and STG, all by which these kernels reach memory.
WAIT, LAUNCH_DEPENDENTS, MEMORY = 0x82E, 0x82D, {0x981, 0xFAE, 0x986}


def shapes(config):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), param_shapes(config))


def compile_loop(method, batch, config=CONFIG, draft_config=None):
    target = Decoder(config, "pallas")
    models = Models(target, shapes(config), None if draft_config is None else shapes(draft_config))

    def start(models, prompt, length):
        request = check_request(
            target, prompt, length, jax.random.key(0), method, Sampling(), NEW_TOKENS, (5,), 0, models.draft_params
        )
        return prefill(models, request, method, NEW_TOKENS), request

    prompt, length = jax.ShapeDtypeStruct((batch, CONTEXT), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    with use_backend("pallas"):
        state, request = jax.eval_shape(start, models, prompt, length)
        return compile_for_h200(
            lambda models, state, request: decode_all(models, state, request, method, NEW_TOKENS),
            models,
            state,
            request,
            donate_argnums=1,
        )


DRAFT_MODEL = Decoder(SMALL, "pallas")
TARGET_HEADS, DRAFT_HEADS = ((0, (0, 1)),), ((0, (1, 2)),)
DUSTIN = Dustin(
    model=DRAFT_MODEL,
    split=160,
    sparse_drafts="last",
    refresh_every=8,
    min_arr=0.5,
    target_heads=TARGET_HEADS,
    draft_heads=DRAFT_HEADS,
)
SKIPPING = {"plan": Plan((True, False), (False, True), 4), "selection": "vegas"}

LOOPS = {
    "plain": (Plain(), 1, PLAIN),
    "plain, 16 rows": (Plain(), 16, PLAIN),
    "vegas": (Vegas(), 1, SPARSE),
    # XLA adds up the logits, which the first kernel writes too
    "vegas, logits": (Vegas(score_mode="logit"), 1, SPARSE - {"cached_attention"}),
    # verification has too many rows, and attention of several parts is always merged by a kernel
    "vegas, 32 rows": (Vegas(), 32, SPARSE - {"cached_attention_merge"}),
    "streaming": (Streaming(), 1, SPARSE),
    "quest": (Quest(), 1, VERIFY | SPARSE_VERIFY),
    "draft model": (DraftModel(model=DRAFT_MODEL), 1, FULL_STEPS, CONFIG, SMALL),
    "dustin": (DUSTIN, 1, SPARSE | SPARSE_VERIFY, CONFIG, SMALL),
    "self-dustin": (SelfDustin(target_heads=TARGET_HEADS, draft_heads=TARGET_HEADS), 1, FULL_STEPS | SPARSE_VERIFY),
    "knapspec, traced": (KnapSpec(max_draft=4, execution="traced"), 1, VERIFY),
    "knapspec, static": (KnapSpec(max_draft=4, **SKIPPING), 1, SPARSE),
    "7B": (Plain(), 1, ATTENTION, LARGE),
}


@pytest.mark.parametrize("case", LOOPS)
def test_decode_loop(case):
    method, batch, expected, *configs = LOOPS[case]
    assert early_kernels(compile_loop(method, batch, *configs).as_text()) == expected


WRITING = {"plain": {"cached_step"}, "vegas": {"sparse_step", "rope_and_cache"}}
WRITING["vegas, logits"] = WRITING["vegas"]


@pytest.mark.parametrize("case", WRITING)
def test_kernels_wait_before_they_read_and_before_others_start(case):
    method, batch, expected = LOOPS[case]
    compiled = compile_loop(method, batch)
    ours = {i.kernel for i in instructions(compiled.as_text()) if i.ours}
    assert expected | WRITING[case] <= ours
    code = {name: use.code for name, use in usage(compiled).items() if name.split("__")[0] in ours}
    assert {name.split("__")[0] for name in code} == ours
    launching = set()
    for name, instructions_of in code.items():
        opcodes = [word & 0xFFF for word, _ in struct.iter_unpack("<QQ", instructions_of)]
        wait = opcodes.index(WAIT)
        assert wait < min(i for i, opcode in enumerate(opcodes) if opcode in MEMORY), name
        if LAUNCH_DEPENDENTS in opcodes:
            launching.add(name.split("__")[0])
            assert wait < opcodes.index(LAUNCH_DEPENDENTS), name
    assert launching == expected


@pytest.mark.parametrize(
    "options",
    [lambda _: {"collect": Collect(hidden=True)}, lambda mask: {"layers": LayerMask((True,) * LAYERS, mask)}],
    ids=["hidden states", "a mask that is traced in part"],
)
def test_forward_whose_residual_stream_xla_reads(options):
    model = Decoder(CONFIG, "pallas")
    cache = jax.eval_shape(lambda: init_cache(CONFIG, 1, CONTEXT, jnp.bfloat16))
    token, start = jax.ShapeDtypeStruct((1, 2), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)

    def run(params, cache, token, start, mask):
        return model.apply({"params": params}, token, cache, start, **options(mask))

    mask = jax.ShapeDtypeStruct((LAYERS,), jnp.bool)
    compiled = compile_for_h200(run, shapes(CONFIG), cache, token, start, mask, donate_argnums=1)
    assert early_kernels(compiled.as_text()) == {"cached_attention"}


def test_a_result_that_xla_reads_would_be_found():
    def norm(x, scale):
        return 2 * add_rms_norm(x, x, scale, eps=1e-6, early=True, backend="pallas")[1]

    x, scale = jax.ShapeDtypeStruct((1, 1, 1536), jnp.bfloat16), jax.ShapeDtypeStruct((1536,), jnp.bfloat16)
    hlo = compile_for_h200(norm, x, scale).as_text()
    with pytest.raises(AssertionError, match="add_rms_norm"):
        early_kernels(hlo)
