"""The device that a command computes on. What is here starts JAX's backend, so arguments are checked before."""

import os


def keep_programs() -> None:
    """On a GPU, has JAX keep compiled programs beside converted checkpoints, unless it was told where."""
    import jax

    from jaxspec.checkpoint import cache_directory

    # a CPU's programs are tied to the features of the very machine that compiled them
    if jax.default_backend() != "gpu" or jax.config.jax_compilation_cache_dir is not None:
        return
    folder = cache_directory() / "programs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    # JAX would warn at every program that it cannot write
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # kernels carry the lines they were traced from, and a moved line would compile them anew
        jax.config.update("jax_traceback_in_locations_limit", 0)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def default_dtype(dtype: str | None) -> str | None:
    """The dtype to load a model in: `dtype`, or without one float32 on a CPU and the stored one elsewhere."""
    import jax

    # CPUs have no bfloat16 matrix units worth the name: float32 is both faster and exact there
    return dtype or ("float32" if jax.default_backend() == "cpu" else None)
