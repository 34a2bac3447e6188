//! Review of the subscriptions of a connection when its login changes.

use std::sync::Arc;

use super::subscribe::{QueryTarget, SubscribeQuery, authorize_query, reopen};
use super::table::OperationId;
use crate::push::subscription::QuerySource;
use crate::session::caller::Caller;
use crate::session::connection::Connection;
use crate::{Code, RequestError};

/// Applies the permissions of a new caller to the subscriptions of a connection. A subscription without permission ends. One whose
/// visible rows change is reopened and starts with a snapshot. Unsent pushes of both are dropped.
///
/// This does not wait: new snapshots are pushed later. So a login is atomic, and expensive queries cannot delay it.
pub(super) fn review(connection: &Arc<Connection>, caller: &Caller) {
    let (server, operation) = (&connection.server, OperationId::subscribe());
    for subscription in connection.subscriptions() {
        let source = &subscription.source;
        if let QuerySource::Named { name, bucket, .. } = source
            && server.bucket_of_query(name).as_deref() != Some(bucket)
        {
            // The query now reads another bucket, with other permissions. The live query also ends, but possibly after the reply.
            subscription.end(RequestError::new(Code::QueryNotDefined, format!("query \"{name}\" is not defined")));
            continue;
        }
        let tier_check = caller.check_tier(Some(operation));
        let target = QueryTarget::from(source);
        let row_filter = match tier_check.and_then(|()| authorize_query(server, caller, operation, target)) {
            Ok(row_filter) => row_filter,
            Err(error) => {
                subscription.end(error);
                continue;
            }
        };
        if let QuerySource::Programmatic { .. } = source {
            if let Some(login_generation) = server.programmatic.change_caller(subscription.number, caller.clone()) {
                subscription.change_login(login_generation);
                server.schedule_computation(subscription.number);
            }
        } else if !subscription.has_row_filter(row_filter.as_ref()) {
            let reopening =
                reopen(connection, SubscribeQuery::from(source), subscription.mode, caller.clone(), row_filter.clone());
            subscription.reopen(reopening, row_filter);
        }
    }
}
