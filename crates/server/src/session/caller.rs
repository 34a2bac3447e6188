//! Whoever sends a request, and what they may do.

use std::sync::Arc;

use tidewire_store::Filter;

use crate::auth::{Access, Grants, Session};
use crate::ops::table::Operation;
use crate::{Auth, Code, RequestError};

/// Somebody who is logged in, with what that permits.
#[derive(Debug)]
pub(crate) struct Login {
    pub(crate) session: Session,
    grants: Grants,
}

impl Login {
    pub(crate) fn new(session: Session, auth: &Auth) -> Self {
        Self { grants: auth.permissions.for_session(&session), session }
    }

    /// What the host decides itself, before the rules are asked.
    fn decided(&self, auth: &Auth, operation: &str, resource: &str) -> Option<bool> {
        auth.check.as_ref()?.check(&self.session, operation, resource)
    }
}

/// Whoever sends a request.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    /// None if nobody is asked who they are.
    auth: Option<Arc<Auth>>,
    login: Option<Arc<Login>>,
}

impl Caller {
    pub(crate) fn new(auth: Option<Arc<Auth>>, login: Option<Arc<Login>>) -> Self {
        Self { auth, login }
    }

    /// Who it is; empty if nobody knows.
    pub(crate) fn user_id(&self) -> &str {
        self.login.as_ref().map_or("", |login| &login.session.user_id)
    }

    /// Whether it may use an operation at all. Those that do not exist are refused to strangers like any other.
    pub(crate) fn enter(&self, operation: Option<Operation>) -> Result<(), RequestError> {
        let Some(auth) = &self.auth else { return Ok(()) };
        let Some(login) = &self.login else {
            let required = || RequestError::new(Code::Unauthorized, "Authentication required: log in with auth.login");
            return if auth.required { Err(required()) } else { Ok(()) };
        };
        let Some(tier) = operation.and_then(Operation::tier) else { return Ok(()) };
        if login.session.reaches(tier) {
            return Ok(());
        }
        Err(RequestError::new(Code::Forbidden, format!("this needs a role with {} access", tier.name())))
    }

    /// Which rows of a bucket it may touch by an operation: all if there is no filter. `resource` is what a host that decides
    /// itself is told.
    pub(crate) fn rows(
        &self,
        operation: Operation,
        bucket: Option<&str>,
        resource: &str,
    ) -> Result<Option<Filter>, RequestError> {
        let Some((auth, login)) = self.auth.as_ref().zip(self.login.as_ref()) else { return Ok(None) };
        let name = operation.name();
        let forbidden = || RequestError::new(Code::Forbidden, format!("{name} on \"{resource}\" is not permitted"));
        if let Some(is_allowed) = login.decided(auth, name, resource) {
            return if is_allowed { Ok(None) } else { Err(forbidden()) };
        }
        match login.grants.access(name, bucket) {
            Access::Denied => Err(forbidden()),
            Access::All => Ok(None),
            // It concerns all rows, and not all are permitted.
            Access::Rows(_) if operation.is_for_all_rows() => Err(forbidden()),
            Access::Rows(filter) => Ok(Some(filter)),
        }
    }

    /// Whether it may use an operation on a topic.
    pub(crate) fn topic(&self, operation: Operation, topic: &str) -> Result<(), RequestError> {
        let Some((auth, login)) = self.auth.as_ref().zip(self.login.as_ref()) else { return Ok(()) };
        let name = operation.name();
        let decided = login.decided(auth, name, topic);
        if decided.unwrap_or_else(|| login.grants.topic_access(name, topic)) {
            return Ok(());
        }
        let shown: String = topic.chars().take(64).collect();
        Err(RequestError::new(Code::Forbidden, format!("{name} on \"{shown}\" is not permitted")))
    }

    /// Whether it may use an operation on anything, for requests that do not say properly on what, or ask for what is not there.
    pub(crate) fn may_ever(&self, operation: &str, resource: &str) -> Result<(), RequestError> {
        let Some((auth, login)) = self.auth.as_ref().zip(self.login.as_ref()) else { return Ok(()) };
        let decided = login.decided(auth, operation, resource);
        if decided.unwrap_or_else(|| login.grants.may_ever(operation)) {
            return Ok(());
        }
        let shown: String = operation.chars().take(64).collect();
        Err(RequestError::new(Code::Forbidden, format!("{shown} is not permitted")))
    }
}

impl Operation {
    /// Whether it changes or tells something of rows that it does not choose among.
    fn is_for_all_rows(self) -> bool {
        matches!(
            self,
            Self::StoreStats
                | Self::StoreDefineBucket
                | Self::StoreUpdateBucket
                | Self::StoreDropBucket
                | Self::ServerStats
                | Self::ServerConnections
        )
    }
}
