//! The commit that stores the declarations of system buckets when a store is opened.

use std::sync::Arc;

use super::StoreOptions;
use super::engine_writes::EngineWrites;
use super::history::{Commit, History};
use super::recover::StoreOpenError;
use crate::engine::{Engine, Write, WriteSet};
use crate::{Cause, Draft, State};

/// Applies the declarations of system buckets to a state. Stores new and changed declarations in one commit.
pub(super) fn declare(
    engine: &mut dyn Engine,
    state: State,
    history: &History,
    options: &StoreOptions,
) -> Result<State, StoreOpenError> {
    let (at, cause) = (options.clock.now(), Cause::default());
    let mut draft = Draft::new(state, at);
    draft.declare(&options.system_buckets)?;
    let (changes, cleared) = draft.changes();
    if changes.is_empty() {
        return Ok(draft.finish().0);
    }
    let engine_writes = EngineWrites::of(changes, cleared, draft.state());
    let writes: Vec<Write<'_>> = engine_writes.iter(changes).collect();
    let position = engine.commit(&[WriteSet { writes: &writes, at, cause }]).map_err(StoreOpenError::Declaration)?;
    let (state, changes) = draft.finish();
    history.append([Arc::new(Commit { position, at, cause, changes })]);
    Ok(state)
}
