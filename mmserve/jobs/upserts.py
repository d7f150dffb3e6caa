"""Rows that may be there already, in SQLite's and in PostgreSQL's words."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite


def put_row(connection: Connection, table: Table, row: Mapping[str, Any]) -> None:
    """Inserts a row, or replaces the one with its primary key."""
    insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    keys = [column.name for column in table.primary_key]
    rest = {name: value for name, value in row.items() if name not in keys}
    connection.execute(insert(table).values(row).on_conflict_do_update(index_elements=keys, set_=rest))
