//! The sender of a request, and what it may do.
//!
//! Permissions are part of the query: the row filter of a caller is joined to each of its reads, writes and subscriptions. So a
//! hidden row is in no result, count or page, and there is no list of exceptions.

use std::sync::Arc;

use tidewire_store::Filter;

use crate::auth::{Access, Grants, Session};
use crate::ops::table::{Operation, OperationId};
use crate::{Auth, Code, RequestError};

/// A session, and the permissions that it has.
#[derive(Debug)]
pub(crate) struct Login {
    pub(crate) session: Session,
    grants: Grants,
}

impl Login {
    pub(crate) fn new(session: Session, auth: &Auth) -> Self {
        Self { grants: auth.permissions.for_session(&session), session }
    }

    /// The decision of the embedding program, which comes before the permission rules.
    fn check(&self, auth: &Auth, operation: &str, resource: &str) -> Option<bool> {
        auth.check.as_ref()?.check(&self.session, operation, resource)
    }
}

/// The sender of a request.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    /// None if the server has no auth: everything is allowed.
    auth: Option<Arc<Auth>>,
    login: Option<Arc<Login>>,
}

impl Caller {
    pub(crate) fn new(auth: Option<Arc<Auth>>, login: Option<Arc<Login>>) -> Self {
        Self { auth, login }
    }

    /// The user who is logged in.
    pub(crate) fn user_id(&self) -> Option<&str> {
        self.login.as_ref().map(|login| &*login.session.user_id)
    }

    /// Checks that the caller is logged in, if that is required, and that its roles reach the tier of the operation. Operations
    /// that do not exist are refused to strangers like any other.
    pub(crate) fn check_tier(&self, operation: Option<OperationId>) -> Result<(), RequestError> {
        let Some(auth) = &self.auth else { return Ok(()) };
        let Some(login) = &self.login else {
            let required = || RequestError::new(Code::Unauthorized, "Authentication required: log in with auth.login");
            return if auth.required { Err(required()) } else { Ok(()) };
        };
        let Some(tier) = operation.and_then(|operation| operation.tier) else { return Ok(()) };
        if login.session.reaches(tier) {
            return Ok(());
        }
        Err(RequestError::new(Code::Forbidden, format!("this needs a role with {} access", tier.name())))
    }

    /// The filter of the rows of a bucket that the caller may touch by an operation; none for all rows. `resource` is what the
    /// embedding program is asked about.
    pub(crate) fn row_filter(
        &self,
        operation: OperationId,
        bucket: Option<&str>,
        resource: &str,
    ) -> Result<Option<Filter>, RequestError> {
        let Some((auth, login)) = self.auth.as_ref().zip(self.login.as_ref()) else { return Ok(None) };
        if let Some(is_allowed) = login.check(auth, operation.name, resource) {
            return if is_allowed { Ok(None) } else { Err(Self::forbidden(operation, resource)) };
        }
        match login.grants.access(operation.name, bucket) {
            Access::Denied => Err(Self::forbidden(operation, resource)),
            Access::All => Ok(None),
            Access::Rows(filter) => Ok(Some(filter)),
        }
    }

    /// Checks whether the caller may use an operation of rules on a topic.
    pub(crate) fn permit_topic(&self, operation: OperationId, topic: &str) -> Result<(), RequestError> {
        let Some((auth, login)) = self.auth.as_ref().zip(self.login.as_ref()) else { return Ok(()) };
        let decided = login.check(auth, operation.name, topic);
        if decided.unwrap_or_else(|| login.grants.topic_access(operation.name, topic)) {
            return Ok(());
        }
        Err(Self::forbidden(operation, topic))
    }

    /// Checks whether the caller may use an operation on anything at all: for requests whose target is not known.
    pub(crate) fn may_ever(&self, operation: &str, resource: &str) -> Result<(), RequestError> {
        let Some((auth, login)) = self.auth.as_ref().zip(self.login.as_ref()) else { return Ok(()) };
        let decided = login.check(auth, operation, resource);
        if decided.unwrap_or_else(|| login.grants.may_ever(operation)) {
            return Ok(());
        }
        let shown: String = operation.chars().take(64).collect();
        Err(RequestError::new(Code::Forbidden, format!("{shown} is not permitted")))
    }

    pub(crate) fn forbidden(operation: OperationId, resource: &str) -> RequestError {
        let (Operation { name, .. }, shown) = (&*operation, resource.chars().take(64).collect::<String>());
        RequestError::new(Code::Forbidden, format!("{name} on \"{shown}\" is not permitted"))
    }
}
