//! The operations of the wire protocol.
//!
//! [`table`] lists them. Each family is one file, and each operation one function in it: it reads its parameters, checks the
//! permission, and runs. The functions know neither sockets nor messages: a [`Call`] has the parameters, the server and the
//! connection, and the outcome is the [`Data`] of the reply or an error. [`handler`](crate::ops::handler) is what transports use.

mod auth;
mod explain;
pub(crate) mod handler;
#[cfg(test)]
mod matrix;
mod review;
mod server;
mod store_admin;
mod store_reads;
mod store_writes;
mod subscribe;
pub(crate) mod table;
mod unavailable;

use std::cell::Cell;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use tidewire_store::Filter;

pub(crate) use self::server::server_stats;
use self::table::OperationId;
use crate::RequestError;
use crate::protocol::reply::Data;
use crate::protocol::request::{Params, Request};
use crate::session::address_limit::network;
use crate::session::caller::Caller;
use crate::session::connection::Connection;
use crate::session::rate_limit::RateKey;
use crate::state::ServerState;
use crate::work::Cancelled;

/// What a request is answered with.
pub(crate) type Outcome = Result<Data, RequestError>;

/// An outcome that comes later.
pub(crate) type OutcomeFuture = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// What an operation returns: the data of its reply, now or later.
pub(crate) type Handled = Result<Answer, RequestError>;

/// The data of a reply, now or later.
pub(crate) enum Answer {
    Now(Data),
    Later(OutcomeFuture),
}

impl Answer {
    fn later(future: impl Future<Output = Outcome> + Send + 'static) -> Self {
        Self::Later(Box::pin(future))
    }
}

impl<T: Into<Data>> From<T> for Answer {
    fn from(data: T) -> Self {
        Self::Now(data.into())
    }
}

/// A request to one operation, while it is parsed, permitted and started.
pub(crate) struct Call<'a> {
    operation: OperationId,
    params: &'a Params<'a>,
    request: &'a Request<'a>,
    server: &'a Arc<ServerState>,
    connection: &'a Arc<Connection>,
    caller: Caller,
    progress: Cell<Progress>,
}

/// How far a call has come. A transport refuses a call that failed before it was admitted in another way than one that failed
/// while it ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// Its parameters are being read.
    Parsing,
    /// The caller may not do this.
    Refused,
    /// It counts towards the rate limit and runs.
    Admitted,
}

/// What a call touches.
#[derive(Debug, Clone, Copy)]
enum Target<'a> {
    Bucket(&'a str),
    /// A query, and the bucket that it reads, if it reads one.
    Query {
        name: &'a str,
        bucket: Option<&'a str>,
    },
    /// Nothing that has a name.
    Everything,
}

impl Call<'_> {
    /// Checks the permission. Returns the filter of the rows that the caller may touch; none for all rows.
    fn permit(&self, target: Target<'_>) -> Result<Option<Filter>, RequestError> {
        self.permit_as(self.operation, target)
    }

    /// Checks the permission for another operation, which is part of this one.
    fn permit_as(&self, operation: OperationId, target: Target<'_>) -> Result<Option<Filter>, RequestError> {
        permit(&self.caller, operation, target).inspect_err(|_| self.progress.set(Progress::Refused))
    }

    /// Counts the request towards the rate limit. Called once, when parameters and permission are good.
    fn admit(&self) -> Result<(), RequestError> {
        self.progress.set(Progress::Admitted);
        limit_rate(self.server, self.connection, &self.caller)
    }

    /// Checks the permission, and admits the call.
    #[inline]
    fn admit_to(&self, target: Target<'_>) -> Result<Option<Filter>, RequestError> {
        let row_filter = self.permit(target)?;
        self.admit()?;
        Ok(row_filter)
    }
}

/// A listing with more entries is made on the pool.
const MAX_INLINE_ENTRIES: usize = 500;

/// Answers with a listing: on this thread if it has few entries, else on the pool.
fn listing(call: &Call<'_>, entries: usize, make: impl FnOnce(&ServerState) -> Outcome + Send + 'static) -> Handled {
    if entries <= MAX_INLINE_ENTRIES {
        return make(call.server).map(Answer::Now);
    }
    Ok(on_pool(call, |server, _| make(server)))
}

/// Answers on the pool. The memory of the answer is the connection's from the moment that it is made, and none is made while the
/// connections hold more than they may: those that are being closed have to release their memory first.
fn on_pool(call: &Call<'_>, make: impl FnOnce(&ServerState, &Cancelled) -> Outcome + Send + 'static) -> Answer {
    let (server, sink) = (Arc::clone(call.server), Arc::clone(&call.connection.sink));
    let made = call.server.work.run(call.connection.number, move |cancelled| {
        if server.memory.used() > server.memory.max_bytes() {
            return Err(server.work.refuse());
        }
        let data = make(&server, cancelled)?;
        let held = sink.hold(data.written_bytes());
        Ok((data, held))
    });
    Answer::later(async move {
        let (data, _held) = made.await??;
        Ok(data)
    })
}

/// Checks whether a caller may use an operation on a target. Returns the filter of the rows that it may touch; none for all rows.
#[inline]
fn permit(caller: &Caller, operation: OperationId, target: Target<'_>) -> Result<Option<Filter>, RequestError> {
    let (bucket, resource) = match target {
        Target::Bucket(bucket) => (Some(bucket), bucket),
        Target::Query { name, bucket } => (bucket, name),
        Target::Everything => (None, "*"),
    };
    caller.row_filter(operation, bucket, resource)
}

/// Checks that a filter of a request does not have too many conditions. Those of row permissions are not the client's, and are not
/// counted.
fn check_conditions(server: &ServerState, filter: &Filter) -> Result<(), RequestError> {
    let (count, max) = (filter.conditions(), server.options.max_filter_conditions);
    if count <= max {
        return Ok(());
    }
    let message = format!("the filter has {count} conditions, and at most {max} are allowed: use $in for many values");
    Err(RequestError::invalid(message))
}

/// Counts a request of a caller towards the rate limit.
#[inline]
fn limit_rate(server: &ServerState, connection: &Connection, caller: &Caller) -> Result<(), RequestError> {
    let Some(rate_limiter) = &server.rate_limiter else { return Ok(()) };
    let address = RateKey::Address(network(connection.address));
    let key = caller.user_id().map_or(address, RateKey::User);
    rate_limiter.take(key, server.store.now()).map_err(|retry_after| {
        server.counters.rate_limited.fetch_add(1, Relaxed);
        RequestError::rate_limited("Rate limit exceeded", retry_after)
    })
}
