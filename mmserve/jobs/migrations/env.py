"""Alembic's entry: migrations run in the transaction of whoever asks for them."""

from alembic import context

from mmserve.jobs.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
    # SQLite changes a table by making it anew.
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
