"""A fast kernel has the names and signatures of its reference, so that either can stand in."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from octopus_trl.kernels import _OPERATIONS, select

KERNELS = sorted({module for module, has_kernel in _OPERATIONS.values() if has_kernel})
FILES = (Path(__file__).parents[2] / "octopus_trl" / "kernels").glob("[!_]*.py")


def public_functions(module: ModuleType) -> dict[str, inspect.Signature]:
    """Map each public function that a module itself defines to its signature."""
    return {
        name: inspect.signature(value)
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }


def test_every_kernel_file_is_one_that_select_knows() -> None:
    assert sorted(path.stem for path in FILES) == KERNELS


@pytest.mark.parametrize("op", sorted(_OPERATIONS))
def test_a_cpu_tensor_takes_the_reference(op: str) -> None:
    assert select(op, "cpu").__module__ == f"octopus_trl.maths.{_OPERATIONS[op][0]}"


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_has_the_names_and_signatures_of_its_reference(name: str) -> None:
    kernel = public_functions(import_module(f"octopus_trl.kernels.{name}"))
    reference = public_functions(import_module(f"octopus_trl.maths.{name}"))
    assert kernel, f"kernels/{name}.py defines no public function"
    differing = {
        function: (str(signature), str(reference.get(function)))
        for function, signature in kernel.items()
        if signature != reference.get(function)
    }
    assert not differing, f"kernel and reference differ: {differing}"


@pytest.mark.parametrize(
    "module", sorted({module for module, _ in _OPERATIONS.values()} - {"paging"})
)
def test_tensors_after_the_first_are_keyword_only(module: str) -> None:
    for name, signature in public_functions(import_module(f"octopus_trl.maths.{module}")).items():
        tensors = [
            parameter
            for parameter in signature.parameters.values()
            if "Tensor" in str(parameter.annotation)
        ]
        positional = [each.name for each in tensors if each.kind is not each.KEYWORD_ONLY]
        assert len(positional) <= 1, f"maths.{module}.{name} takes {positional} by position"
