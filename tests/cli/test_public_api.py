"""Every public function and class has a docstring and type hints on all of its parameters."""

import importlib
import inspect
import pkgutil

import pytest


def modules():
    for package in ("jaxspec", "convert", "pallas_kernels"):
        root = importlib.import_module(package)
        yield package
        for info in pkgutil.walk_packages(root.__path__, f"{package}."):
            if not info.name.endswith("__main__"):
                yield info.name


def is_public(name):
    return not name.startswith("_")


def functions_of(cls):
    for name, member in vars(cls).items():
        if isinstance(member, property):
            yield name, member.fget
        elif isinstance(member, staticmethod | classmethod):
            yield name, member.__func__
        elif inspect.isfunction(member):
            yield name, member


def problems_of(function, where, hidden_first):
    function = inspect.unwrap(function)
    if not inspect.getdoc(function):
        yield f"{where}: no docstring"
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[hidden_first:]
    for parameter in parameters:
        if parameter.annotation is inspect.Parameter.empty:
            yield f"{where}: no type for {parameter.name}"
    if signature.return_annotation is inspect.Signature.empty:
        yield f"{where}: no type for what it returns"


def inherits(cls, name):
    """Whether a method only overrides one that is documented."""
    return any(inspect.getdoc(getattr(base, name, None)) for base in cls.__mro__[1:] if base is not object)


@pytest.mark.parametrize("name", list(modules()))
def test_docstrings_and_types(name):
    module = importlib.import_module(name)
    problems = [] if module.__doc__ else [f"{name}: no docstring"]
    for attribute, value in vars(module).items():
        if not is_public(attribute) or getattr(value, "__module__", None) != name:
            continue
        where = f"{name}.{attribute}"
        if inspect.isclass(value):
            # dataclasses and named tuples would otherwise show their signature as documentation
            if not value.__doc__ or value.__doc__.startswith(f"{attribute}("):
                problems.append(f"{where}: no docstring")
            for method, function in functions_of(value):
                own = getattr(function, "__module__", None) == name and function.__qualname__.startswith(attribute)
                if is_public(method) and own:
                    found = list(problems_of(function, f"{where}.{method}", hidden_first=1))
                    if inherits(value, method):
                        found = [problem for problem in found if "no docstring" not in problem]
                    problems += found
        elif callable(value) and hasattr(inspect.unwrap(value), "__code__"):
            problems += problems_of(value, where, hidden_first=0)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("package", ["jaxspec", "convert"])
def test_exported_names_exist(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
