"""Reads the imports of a package from its source, without running any of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def module_name(path: Path, *, root: Path) -> str:
    """Name a file as Python would: `root` is the folder that holds the top package."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, *, root: Path) -> Iterator[tuple[int, str]]:
    """Yield line and absolute dotted name of everything a file imports, wherever it does so.

    `from a.b import c` gives `a.b.c`: whether c is a module or a name in one, a prefix decides.
    """
    package = module_name(path, root=root).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                yield node.lineno, f"{source}.{alias.name}"
