"""Values that are tables: a notebook shows them, and they become data frames of pandas, polars or anything that reads
Arrow.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

#: in the order in which they are tried; one that the program has imported comes first
_LIBRARIES = ("pandas", "polars")


class Tabular:
    """A value with rows; :meth:`frame_columns` gives them."""

    __slots__ = ()

    def frame_columns(self) -> Mapping[str, Sequence[Any] | NDArray[Any]]:
        """Name -> values of each column of :meth:`to_dataframe`, all of one length; None or NaN for missing ones."""
        raise NotImplementedError

    def to_dataframe(self) -> Any:
        """A data frame of pandas or polars: of the one that the program has imported, or else that is installed.

        gtrace depends on neither. With both, ``polars.DataFrame(value)`` and ``pandas.DataFrame.from_arrow(value)``
        choose; they need pyarrow.

        Raises:
            UsageError: neither is installed.
        """
        columns = _plain(self.frame_columns())
        for library in sorted(_LIBRARIES, key=lambda name: name not in sys.modules):
            try:
                return importlib.import_module(library).DataFrame(columns)
            except ImportError:
                continue
        raise UsageError("to_dataframe: needs pandas or polars, and neither is installed: pip install pandas")

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The rows as an Arrow stream, which polars, pandas 3, DuckDB and others read.

        Raises:
            UsageError: pyarrow is not installed.
        """
        try:
            import pyarrow  # type: ignore[import-untyped]
        except ImportError:
            raise UsageError(
                "Arrow tables need pyarrow, which is not installed: pip install 'gradtrace[parquet]'"
            ) from None
        return pyarrow.table(_plain(self.frame_columns())).__arrow_c_stream__(requested_schema)

    def _repr_html_(self) -> str:
        # What shows a value is the report, which is above it.
        notebook = importlib.import_module("gtrace.report.html")
        shown: str = notebook.to_notebook(self)
        return shown


def _plain(columns: Mapping[str, Sequence[Any] | NDArray[Any]]) -> dict[str, Any]:
    """Columns of objects as lists: polars would keep an array of them as Python objects."""
    return {
        name: values.tolist() if isinstance(values, np.ndarray) and values.dtype == object else values
        for name, values in columns.items()
    }
