//! The operations of the wire protocol.
//!
//! [`table`] lists all operations. Each family is one file, and each operation is one function that reads its parameters, checks the
//! permission and runs. The functions are independent of sockets and messages: they get a [`Call`] and return the [`Data`] of the
//! reply or an error. Transports use [`handler`].

mod auth;
mod explain;
pub(crate) mod handler;
#[cfg(test)]
mod permission_matrix;
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
use crate::work::CancelToken;

/// The data of a reply, or an error.
pub(crate) type ReplyResult = Result<Data, RequestError>;

/// The future of a [`ReplyResult`].
pub(crate) type ReplyFuture = Pin<Box<dyn Future<Output = ReplyResult> + Send>>;

/// The result of starting a request: a reply or an error.
pub(crate) type HandlerResult = Result<HandlerReply, RequestError>;

/// The reply to a request, immediately or as a future.
pub(crate) enum HandlerReply {
    Ready(Data),
    /// Must be polled to completion. Dropping it abandons the request, but does not undo what it has already done.
    Pending(ReplyFuture),
}

impl HandlerReply {
    fn pending(future: impl Future<Output = ReplyResult> + Send + 'static) -> Self {
        Self::Pending(Box::pin(future))
    }
}

impl<T: Into<Data>> From<T> for HandlerReply {
    fn from(data: T) -> Self {
        Self::Ready(data.into())
    }
}

/// The call of an operation: its parameters, its caller and its progress.
pub(crate) struct Call<'a> {
    operation: OperationId,
    params: &'a Params<'a>,
    request: &'a Request<'a>,
    server: &'a Arc<ServerState>,
    connection: &'a Arc<Connection>,
    caller: Caller,
    progress: Cell<Progress>,
}

/// The progress of a call. It shows the handler whether a call failed because of its parameters, because of its permission, or later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// The parameters are being read.
    Parsing,
    /// The caller lacks the permission.
    Denied,
    /// The call was counted towards the rate limit and runs.
    Admitted,
}

/// The target of a call.
#[derive(Debug, Clone, Copy)]
enum Target<'a> {
    Bucket(&'a str),
    /// A query, and the bucket that it reads, if it reads one.
    Query {
        name: &'a str,
        bucket: Option<&'a str>,
    },
    /// No specific bucket or query.
    Everything,
}

impl Call<'_> {
    /// Checks the permission. Returns the filter of the rows that the caller may access; `None` for all rows.
    fn authorize(&self, target: Target<'_>) -> Result<Option<Filter>, RequestError> {
        self.authorize_operation(self.operation, target)
    }

    /// Checks the permission for another operation that is part of this one.
    fn authorize_operation(&self, operation: OperationId, target: Target<'_>) -> Result<Option<Filter>, RequestError> {
        authorize(&self.caller, operation, target).inspect_err(|_| self.progress.set(Progress::Denied))
    }

    /// Counts the request towards the rate limit. Called once, after the parameters and the permission were checked.
    fn admit(&self) -> Result<(), RequestError> {
        self.progress.set(Progress::Admitted);
        limit_rate(self.server, self.connection, &self.caller)
    }

    /// Checks the permission and admits the call.
    #[inline]
    fn admit_to(&self, target: Target<'_>) -> Result<Option<Filter>, RequestError> {
        let row_filter = self.authorize(target)?;
        self.admit()?;
        Ok(row_filter)
    }
}

/// Limit of the entries of a listing that is built on the I/O thread.
const MAX_INLINE_ENTRIES: usize = 500;

/// Builds a listing: on this thread if it has few entries, otherwise on the pool.
fn build_listing(
    call: &Call<'_>,
    entries: usize,
    compute: impl FnOnce(&ServerState) -> ReplyResult + Send + 'static,
) -> HandlerResult {
    if entries <= MAX_INLINE_ENTRIES {
        return compute(call.server).map(HandlerReply::Ready);
    }
    Ok(run_on_pool(call, |server, _| compute(server)))
}

/// Computes a reply on the worker pool, and charges its memory to the connection. While the memory limit is exceeded, the request is
/// rejected, so that the connections being closed can release their memory first.
fn run_on_pool(
    call: &Call<'_>,
    compute: impl FnOnce(&ServerState, &CancelToken) -> ReplyResult + Send + 'static,
) -> HandlerReply {
    let (server, sink) = (Arc::clone(call.server), Arc::clone(&call.connection.sink));
    let computed = call.server.work.run(call.connection.number, move |cancelled| {
        if server.memory.used() > server.memory.max_bytes() {
            return Err(server.work.reject_for_memory());
        }
        let data = compute(&server, cancelled)?;
        let held = sink.hold(data.encoded_bytes());
        Ok((data, held))
    });
    HandlerReply::pending(async move {
        let (data, _held) = computed.await??;
        Ok(data)
    })
}

/// Checks whether a caller may use an operation on a target. Returns the filter of the rows that it may access; `None` for all rows.
#[inline]
fn authorize(caller: &Caller, operation: OperationId, target: Target<'_>) -> Result<Option<Filter>, RequestError> {
    let (bucket, resource) = match target {
        Target::Bucket(bucket) => (Some(bucket), bucket),
        Target::Query { name, bucket } => (bucket, name),
        Target::Everything => (None, "*"),
    };
    caller.authorize(operation, bucket, resource)
}

/// Checks that the filter of a request does not have too many conditions. The conditions of row filters do not count.
fn check_conditions(server: &ServerState, filter: &Filter) -> Result<(), RequestError> {
    let (count, max) = (filter.conditions(), server.options.max_filter_conditions);
    if count <= max {
        return Ok(());
    }
    let message = format!("the filter has {count} conditions; at most {max} are allowed. Use $in to match many values");
    Err(RequestError::invalid(message))
}

/// Counts a request of a caller towards the rate limit, and returns an error if it is exceeded.
#[inline]
fn limit_rate(server: &ServerState, connection: &Connection, caller: &Caller) -> Result<(), RequestError> {
    let Some(rate_limiter) = &server.rate_limiter else { return Ok(()) };
    let address = RateKey::Address(network(connection.address));
    let key = caller.user_id().map_or(address, RateKey::User);
    rate_limiter.try_acquire(key, server.store.now()).map_err(|retry_after| {
        server.counters.rate_limited.fetch_add(1, Relaxed);
        RequestError::rate_limited("Rate limit exceeded", retry_after)
    })
}
