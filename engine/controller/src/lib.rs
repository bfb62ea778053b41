//! Chooses codec and level while a migration runs.
