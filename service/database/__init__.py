"""The database of the control plane: engine, tables, migrations."""
