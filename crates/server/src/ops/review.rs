//! The subscriptions of a connection after its login has changed.

use std::sync::Arc;

use super::subscribe::{QueryTarget, Subscribed, permit_query, reopen};
use super::table::OperationId;
use crate::push::subscription::Source;
use crate::session::caller::Caller;
use crate::session::connection::Connection;
use crate::{Code, RequestError};

/// Reviews the subscriptions of a connection for another caller. Those that it may not have end, and those that show it other rows
/// begin anew with the whole result. Unsent pushes of both are dropped.
///
/// This does not wait, and the results come later as pushes. So a login is either done or not, and no client can delay it by the
/// cost of its queries.
pub(super) fn review(connection: &Arc<Connection>, caller: &Caller) {
    let (server, operation) = (&connection.server, OperationId::subscribe());
    for subscription in connection.subscriptions() {
        let source = &subscription.source;
        if let Source::Named { name, bucket, .. } = source
            && server.bucket_of_query(name).as_deref() != Some(bucket)
        {
            // The permission would be that for another bucket. Live queries end it too, but perhaps after the reply.
            subscription.end(RequestError::new(Code::QueryNotDefined, format!("query \"{name}\" is not defined")));
            continue;
        }
        let permitted = caller.check_tier(Some(operation));
        let target = QueryTarget::from(source);
        let row_filter = match permitted.and_then(|()| permit_query(server, caller, operation, target)) {
            Ok(row_filter) => row_filter,
            Err(error) => {
                subscription.end(error);
                continue;
            }
        };
        if let Source::Programmatic { .. } = source {
            if let Some(login) = server.programmatic.change_caller(subscription.number, caller.clone()) {
                subscription.change_login(login);
                server.compute_later(subscription.number);
            }
        } else if !subscription.shows(row_filter.as_ref()) {
            let reopening =
                reopen(connection, Subscribed::from(source), subscription.mode, caller.clone(), row_filter.clone());
            subscription.reopen(reopening, row_filter);
        }
    }
}
