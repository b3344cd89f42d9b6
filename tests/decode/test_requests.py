"""What `generate` and `stream` refuse, and how prompts are padded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import Finish, Plain, Sampling, generate, stream
from jaxspec.requests import bucket
from tests.reference import tiny_model

KEY = jax.random.key(0)
PROMPT = np.array([[3, 4, 5], [6, 7, 0]], np.int32)
LENGTHS = np.array([3, 2], np.int32)


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=1, max_position_embeddings=40)


def arguments(**changes):
    values = {"prompt": PROMPT, "prompt_length": LENGTHS, "key": KEY, "max_new_tokens": 8, **changes}
    return values


REJECTED = {
    "empty prompt": ({"prompt_length": np.array([3, 0])}, r"prompt_length must lie in 1\.\.3; got \[0\]"),
    "negative length": ({"prompt_length": np.array([-1, 2])}, r"prompt_length must lie in 1\.\.3; got \[-1\]"),
    "length beyond the prompt": ({"prompt_length": np.array([4, 2])}, r"prompt_length must lie in 1\.\.3; got \[4\]"),
    "no rows": ({"prompt": np.zeros((0, 3), int), "prompt_length": np.zeros(0, int)}, r"prompt must be \[B, P\]"),
    "empty list": ({"prompt": []}, r"prompt must be \[B, P\]"),
    "empty row": ({"prompt": [[]], "prompt_length": [0]}, r"prompt must be \[B, P\]"),
    "no columns": ({"prompt": np.zeros((2, 0), int)}, r"prompt must be \[B, P\]"),
    "one dimension": ({"prompt": np.array([1, 2, 3])}, r"prompt must be \[B, P\]"),
    "lengths of another batch": ({"prompt_length": np.array([3])}, r"prompt_length must have shape \[2\]"),
    "length a scalar": ({"prompt_length": 3}, r"prompt_length must have shape \[2\]"),
    "float prompt": ({"prompt": PROMPT.astype(np.float32)}, "prompt must be an integer array, got dtype float32"),
    "bool prompt": ({"prompt": PROMPT > 3}, "prompt must be an integer array, got dtype bool"),
    "text": ({"prompt": "hello"}, "prompt must be an integer array"),
    "ragged list": ({"prompt": [[1, 2], [3]]}, "prompt must be an integer array"),
    "float lengths": ({"prompt_length": LENGTHS.astype(float)}, "prompt_length must be an integer array"),
    "id too large": ({"prompt": np.array([[3, 61, 5], [6, 7, 0]])}, r"prompt ids must lie in 0\.\.60; got \[61\]"),
    "id negative": ({"prompt": np.array([[3, 4, 5], [-1, 7, 0]])}, r"prompt ids must lie in 0\.\.60; got \[-1\]"),
    "id beyond int32": ({"prompt": np.array([[3, 2**32 + 4, 5], [6, 7, 0]])}, r"prompt ids must lie in 0\.\.60"),
    "too many positions": (
        {"max_new_tokens": 38},
        r"must fit the model's 40 positions, 2 of them for the prompt; got \[3\]",
    ),
    "more new tokens than positions": ({"max_new_tokens": 41}, r"max_new_tokens must lie in 1\.\.40, got 41"),
    "no new tokens": ({"max_new_tokens": 0}, r"max_new_tokens must lie in 1\.\.40, got 0"),
    "new tokens float": ({"max_new_tokens": 8.0}, r"max_new_tokens must be an integer in 1\.\.40, got 8\.0"),
    "new tokens true": ({"max_new_tokens": True}, "max_new_tokens must be an integer"),
    "new tokens none": ({"max_new_tokens": None}, "max_new_tokens must be an integer"),
    "eos outside": ({"eos_ids": (2, 61)}, r"eos_ids must lie in 0\.\.60, got 61"),
    "eos negative": ({"eos_ids": [-1]}, r"eos_ids must lie in 0\.\.60, got -1"),
    "eos float": ({"eos_ids": (2.0,)}, r"eos_ids must be an integer in 0\.\.60, got 2\.0"),
    "eos one id": ({"eos_ids": 2}, "eos_ids must be a sequence of ids, got 2"),
    "eos none": ({"eos_ids": None}, "eos_ids must be a sequence of ids, got None"),
    "seed for a key": ({"key": 0}, r"key must be a JAX PRNG key, got int; make one with jax\.random\.key"),
    "float key": ({"key": jnp.zeros(2)}, "key must be a JAX PRNG key, got dtype float32"),
    "key of no known size": ({"key": jnp.zeros(3, jnp.uint32)}, "key must be a JAX PRNG key"),
    "keys of another batch": ({"key": jax.random.split(KEY, 3)}, r"one per row \[2\], got shape \(3,\)"),
    "sampling": ({"sampling": 0.7}, r"sampling must be a Sampling, got 0\.7"),
    "sampling value": ({"sampling": Sampling(temperature=np.float32(-1))}, "temperature must be a finite number >= 0"),
    "sampling shape": ({"sampling": Sampling(temperature=np.ones(3))}, r"scalar or have shape \[2\]"),
    "method": ({"method": "plain"}, "method must be a Method, got 'plain'"),
    "method class": ({"method": Plain}, "method must be a Method"),
    "draft params": ({"draft_params": {}}, "method Plain takes no draft_params"),
}


@pytest.mark.parametrize("function", [generate, stream])
@pytest.mark.parametrize("case", REJECTED)
def test_rejected(case, function, model):
    """By the call itself, before anything is computed."""
    changes, message = REJECTED[case]
    with pytest.raises(ValueError, match=message):
        function(*model, **arguments(**changes))


@pytest.mark.parametrize("value", [2**31, "0", None, 1.5])
def test_pad_id(value, model):
    with pytest.raises(ValueError, match="pad_id must"):
        generate(*model, **arguments(pad_id=value))


def test_model_of_another_type(model):
    with pytest.raises(ValueError, match="model must be a Decoder, got 'smollm2'"):
        generate("smollm2", model[1], **arguments())


def test_unknown_options_raise(model):
    with pytest.raises(TypeError, match="repetition_penalty"):
        generate(*model, **arguments(repetition_penalty=1.1))


@pytest.mark.parametrize("scaling", [None, {"type": "dynamic", "factor": 4.0}])
def test_every_position_may_be_used_and_no_more(scaling):
    """Dynamic rope changes its base behind its original positions, so they are the limit whatever its factor."""
    model, params = tiny_model(num_hidden_layers=1, max_position_embeddings=40, rope_scaling=scaling)
    prompt, lengths = np.ones((2, 32), np.int32), np.array([32, 5])
    output = generate(model, params, prompt, lengths, KEY, max_new_tokens=8)
    np.testing.assert_array_equal(output.lengths, 8)
    with pytest.raises(ValueError, match=r"40 positions, 31 of them for the prompt; got \[32\]"):
        generate(model, params, prompt, lengths, KEY, max_new_tokens=9)


def test_ids_behind_the_length_do_not_matter(model):
    expected = generate(*model, **arguments())
    for rubbish in (-1, 10**6):
        prompt = PROMPT.copy()
        prompt[1, 2] = rubbish
        np.testing.assert_array_equal(generate(*model, **arguments(prompt=prompt)).tokens, expected.tokens)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64])
@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
def test_integer_dtypes(dtype, convert, model):
    output = generate(
        *model, **arguments(prompt=convert(PROMPT.astype(dtype)), prompt_length=convert(LENGTHS.astype(dtype)))
    )
    np.testing.assert_array_equal(output.tokens, generate(*model, **arguments()).tokens)


def test_widths_that_the_lengths_dtype_cannot_hold():
    model = tiny_model(num_hidden_layers=1, vocab_size=300)
    prompt = np.pad(PROMPT, ((0, 0), (0, 197))).astype(np.int16)
    output = jax.jit(lambda p, n: generate(*model, **arguments(prompt=p, prompt_length=n)))(prompt, np.int8(LENGTHS))
    np.testing.assert_array_equal(output.tokens, generate(*model, **arguments()).tokens)


def test_lists_will_do(model):
    output = generate(*model, **arguments(prompt=PROMPT.tolist(), prompt_length=LENGTHS.tolist(), eos_ids=[]))
    np.testing.assert_array_equal(output.tokens, generate(*model, **arguments()).tokens)


def test_bucket():
    widths = [bucket(n) for n in range(1, 5000)]
    assert widths[0] == 128
    assert all(width >= n for n, width in enumerate(widths, 1))
    assert all(width <= 1.25 * n for n, width in enumerate(widths, 1) if n > 128)
    assert len(set(widths)) <= 1 + 4 * 6
    assert all(bucket(width) == width for width in set(widths))


POSSIBLE = {
    "prompt": np.pad(PROMPT, ((0, 0), (0, 33))),
    "prompt_length": LENGTHS,
    "temperature": np.array([0, 1], np.float32),
    "top_k": np.array([1, 5]),
    "top_p": np.array([1, 0.9], np.float32),
    "min_p": np.array([0, 0.1], np.float32),
}
WRONG_WHEN_TRACED = {
    "length 0": ("prompt_length", 0),
    "length negative": ("prompt_length", -5),
    "length beyond the prompt": ("prompt_length", 37),
    "no room for the new tokens": ("prompt_length", 33),
    "id outside": ("prompt", 61),
    "id negative": ("prompt", -1),
    "temperature negative": ("temperature", -1),
    "temperature nan": ("temperature", np.nan),
    "temperature infinite": ("temperature", np.inf),
    "top_k": ("top_k", 0),
    "top_p 0": ("top_p", 0),
    "top_p above 1": ("top_p", 1.5),
    "min_p negative": ("min_p", -0.5),
    "min_p above 1": ("min_p", 1.5),
}


@pytest.fixture(scope="module")
def traced_generate(model):
    @jax.jit
    def run(params, prompt, prompt_length, key, **filters):
        values = arguments(prompt=prompt, prompt_length=prompt_length, key=key, sampling=Sampling(**filters), pad_id=-7)
        return generate(model[0], params, **values)

    return lambda **changes: run(model[1], key=KEY, **POSSIBLE | changes)


@pytest.mark.parametrize("case", WRONG_WHEN_TRACED)
def test_traced_wrong_values_make_the_row_invalid(case, model, traced_generate):
    """The second row is wrong; the first is what it is beside a row that is right."""
    name, wrong = WRONG_WHEN_TRACED[case]
    values = POSSIBLE[name].copy()
    values[(1, 0) if values.ndim == 2 else 1] = wrong
    expected, output = traced_generate(), traced_generate(**{name: values})
    np.testing.assert_array_equal(expected.tokens[0], generate(*model, **arguments()).tokens[0])
    np.testing.assert_array_equal(output.tokens[0], expected.tokens[0])
    np.testing.assert_array_equal(output.tokens[1], -7)
    assert expected.lengths.tolist() == [8, 8]
    assert output.lengths.tolist() == [8, 0]
    assert output.finish.tolist() == [Finish.LENGTH, Finish.INVALID]
    assert output.stats.emitted.tolist() == [7, 0]


@pytest.mark.parametrize("traced", [("prompt",), ("prompt_length",)])
def test_any_argument_may_be_traced_alone(traced, model):
    values = arguments()
    inner = {name: values.pop(name) for name in traced}
    output = jax.jit(lambda params, inner: generate(model[0], params, **inner, **values))(model[1], inner)
    np.testing.assert_array_equal(output.tokens, generate(*model, **arguments()).tokens)


def test_shapes_are_checked_under_tracing_too(model):
    with pytest.raises(ValueError, match=r"prompt_length must have shape \[2\]"):
        jax.jit(lambda n: generate(*model, **arguments(prompt_length=n)))(jnp.ones(3, jnp.int32))
    with pytest.raises(ValueError, match="temperature must be a scalar"):
        jax.jit(lambda t: generate(*model, **arguments(sampling=Sampling(temperature=t))))(jnp.ones(3))
