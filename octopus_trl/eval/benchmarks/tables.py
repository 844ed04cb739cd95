"""Reads the asked columns of a table: a file, a folder of files, or a data set of the hub."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from octopus_trl.agent.corpus import parse_record
from octopus_trl.errors import ConfigError


def read_rows(
    source: str | Path,
    columns: Sequence[str],
    *,
    split: str,
    config: str | None = None,
    revision: str | None = None,
    optional: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Give the rows of a table with these columns only, one by one.

    Of a parquet file the other columns are never read, and of a hub data set never downloaded.

    Args:
        source: a `.jsonl` or `.parquet` file, a folder as the hub serves it, or a hub name.
        columns: every one must be there.
        split, config, revision: of a folder or a hub data set.
        optional: further columns, taken where they are.
    Raises:
        ConfigError: nothing there, offline, no such split, a missing column, a broken line.
    """
    path = Path(source)
    if path.is_file():
        return _of_file(path, columns, optional)
    return _of_dataset(str(source), columns, optional, split, config, revision)


def _of_file(
    path: Path, columns: Sequence[str], optional: Sequence[str]
) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        yield from _of_parquet(path, columns, optional)
        return
    if path.suffix not in (".jsonl", ".json"):
        raise ConfigError(f"{path}: a table is a .jsonl or .parquet file; convert it")
    wanted = [*columns, *optional]
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                record = parse_record(line, f"{path}:{number}")
                _check(f"{path}:{number}", columns, list(record))
                yield {name: record[name] for name in wanted if name in record}


def _of_parquet(
    path: Path, columns: Sequence[str], optional: Sequence[str]
) -> Iterator[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            _check(str(path), columns, names)
            wanted = [*columns, *(name for name in optional if name in names)]
            for batch in table.iter_batches(batch_size=256, columns=wanted):
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(
            f"{path}: no readable parquet file ({type(error).__name__}); download it again"
        ) from None


def _of_dataset(
    source: str,
    columns: Sequence[str],
    optional: Sequence[str],
    split: str,
    config: str | None,
    revision: str | None,
) -> Iterator[dict[str, Any]]:
    import datasets

    place = f"{source}, {f'config {config}, ' if config else ''}split {split}"
    options: dict[str, Any] = {"split": split, "streaming": True, "revision": revision}
    try:
        table = datasets.load_dataset(source, config, **options)
        names = table.column_names
        if names is None:  # files of JSON say what they hold only when they are read
            names = list(next(iter(table), {}))
        _check(place, columns, names)
        wanted = [*columns, *(name for name in optional if name in names)]
        yield from _selected(datasets, table, source, config, options, wanted)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 -- several libraries' errors come through here
        # Only the kind of the error: a message of a parser may quote what it read.
        raise ConfigError(
            f"{place}: cannot be loaded ({type(error).__name__}); check the name and split, or get "
            f"it where there is a network with `hf download --repo-type dataset {source} "
            "--local-dir FOLDER` and give FOLDER"
        ) from None


def _selected(
    datasets: Any,
    table: Any,
    source: str,
    config: str | None,
    options: dict[str, Any],
    wanted: list[str],
) -> Iterable[dict[str, Any]]:
    try:
        rows = datasets.load_dataset(source, config, columns=wanted, **options)
    except (TypeError, ValueError):  # its files are no parquet and have no such option
        rows = table.select_columns(wanted)
    for row in rows:
        yield {name: row[name] for name in wanted}


def _check(place: str, columns: Sequence[str], names: Sequence[str]) -> None:
    if missing := [name for name in columns if name not in names]:
        raise ConfigError(
            f"{place}: no column {', '.join(missing)}; its columns are {', '.join(names)}; this "
            "loader reads the schema of data/README.md"
        )
