//! The sender of a request, and what it may do.
//!
//! Permissions are part of the query: the row filter of a caller is joined to each of its reads, writes and subscriptions. So a
//! hidden row is in no result, count or page, and there is no list of exceptions.
//!
//! [`Caller::decide`] is the one place that decides. Requests ask it when their target is known; [`check_tier`](Caller::check_tier)
//! and [`may_ever`](Caller::may_ever) refuse earlier what it would refuse for every target.

use std::sync::Arc;

use tidewire_store::{Filter, ReferenceFilter};

use super::decision::{Decision, Grounds, Refusal};
use crate::auth::{Access, Grants, Session};
use crate::auth::{Auth, Tier};
use crate::ops::table::{OperationId, Scope};
use crate::{Code, RequestError};

/// A session, and the permissions that it has.
#[derive(Debug)]
pub(crate) struct Login {
    pub(crate) session: Session,
    pub(crate) grants: Grants,
    /// The tier of its built-in roles.
    pub(crate) role_tier: Option<Tier>,
    /// Whether some rows may be hidden from it.
    has_row_filters: bool,
}

impl Login {
    pub(crate) fn new(session: Session, auth: &Auth) -> Self {
        let grants = auth.permissions.for_session(&session);
        let (role_tier, has_row_filters) = (session.tier(), grants.have_row_filters());
        Self { session, grants, role_tier, has_row_filters }
    }

    /// The decision of the embedding program, which comes before the permission rules.
    fn check(&self, auth: &Auth, operation: &str, resource: &str) -> Option<bool> {
        auth.check.as_ref()?.check(&self.session, operation, resource)
    }
}

/// How the tier of a client compares with that of an operation.
enum Reach {
    Enough,
    /// Only a rule for one of its roles, or the check of the embedding program, can allow the operation.
    NeedsRule(Tier),
    TooLow(Refusal),
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

    /// The settings that bind it; none if the server has no auth.
    pub(super) fn auth(&self) -> Option<&Auth> {
        self.auth.as_deref()
    }

    pub(super) fn login(&self) -> Option<&Login> {
        self.login.as_deref()
    }

    /// Decides whether the caller may use an operation on a bucket, or on nothing that has a name. `resource` is what the embedding
    /// program is asked about.
    #[inline]
    pub(crate) fn decide(&self, operation: OperationId, bucket: Option<&str>, resource: &str) -> Decision {
        let reach = self.reach(operation.tier);
        if let Reach::TooLow(refusal) = reach {
            return Decision::Refused(refusal);
        }
        if bucket.is_some_and(|bucket| bucket.starts_with('$')) {
            return Decision::Refused(Refusal::SystemBucket);
        }
        let Some(auth) = &self.auth else { return Decision::Allowed(Grounds::AuthOff, None) };
        let Some(login) = &self.login else { return Decision::Allowed(Grounds::Anonymous, None) };
        if operation.scope == Scope::Connection {
            return match reach {
                Reach::NeedsRule(tier) => Decision::Refused(Refusal::DefaultTier(tier)),
                _ => Decision::Allowed(Grounds::OwnConnection, None),
            };
        }
        match login.check(auth, operation.name, resource) {
            Some(true) => return Decision::Allowed(Grounds::Check, None),
            Some(false) => return Decision::Refused(Refusal::Check),
            None => {}
        }
        let by_rules = match operation.scope {
            Scope::Topic => login.grants.rules_allow_topic(operation.name, resource).then_some(Access::All),
            _ => login.grants.rule_access(operation.name, bucket),
        };
        let (grounds, access) = match (by_rules, reach) {
            (Some(access), _) => (Grounds::Rules, access),
            (None, Reach::NeedsRule(tier)) => return Decision::Refused(Refusal::DefaultTier(tier)),
            (None, _) => (Grounds::Default, login.grants.default_access()),
        };
        match access {
            Access::Denied => Decision::Refused(Refusal::Default),
            Access::Rows(_) if operation.scope.concerns_all_rows() => Decision::Refused(Refusal::AllRows),
            Access::Rows(filter) => Decision::Allowed(grounds, Some(filter)),
            Access::All => Decision::Allowed(grounds, None),
        }
    }

    fn reach(&self, required: Option<Tier>) -> Reach {
        let Some(auth) = &self.auth else { return Reach::Enough };
        let Some(login) = &self.login else {
            return match (auth.required, required, auth.anonymous_tier) {
                (true, ..) => Reach::TooLow(Refusal::NotLoggedIn),
                (false, Some(tier), Some(has)) if tier > has => Reach::TooLow(Refusal::AnonymousTier(tier)),
                _ => Reach::Enough,
            };
        };
        match (required, login.role_tier) {
            (Some(tier), Some(has)) if tier > has => Reach::TooLow(Refusal::RoleTier(tier)),
            (Some(tier), None) if tier > auth.default_tier => Reach::NeedsRule(tier),
            _ => Reach::Enough,
        }
    }

    /// Checks, before the target is known, that the caller is logged in, if that is required, and that its tier reaches that of the
    /// operation or a rule may lift it. Operations that do not exist are refused to strangers like any other.
    pub(crate) fn check_tier(&self, operation: Option<OperationId>) -> Result<(), RequestError> {
        let refusal = match self.reach(operation.and_then(|operation| operation.tier)) {
            Reach::Enough => return Ok(()),
            Reach::TooLow(refusal) => refusal,
            Reach::NeedsRule(_) if operation.is_some_and(|operation| self.may_be_lifted(operation)) => return Ok(()),
            Reach::NeedsRule(tier) => Refusal::DefaultTier(tier),
        };
        Err(refusal.error(operation.map_or("", |operation| operation.name), "*"))
    }

    /// Whether a rule or the check of the embedding program may allow an operation above the tier of the caller.
    fn may_be_lifted(&self, operation: OperationId) -> bool {
        let has_check = self.auth.as_ref().is_some_and(|auth| auth.check.is_some());
        has_check || self.login.as_ref().is_some_and(|login| login.grants.rules_may_ever_allow(operation.name))
    }

    /// The filter of the rows of a bucket that the caller may touch by an operation; none for all rows. `resource` is what the
    /// embedding program is asked about.
    #[inline]
    pub(crate) fn row_filter(
        &self,
        operation: OperationId,
        bucket: Option<&str>,
        resource: &str,
    ) -> Result<Option<Filter>, RequestError> {
        match self.decide(operation, bucket, resource) {
            Decision::Allowed(_, row_filter) => Ok(row_filter),
            Decision::Refused(Refusal::SystemBucket) => {
                Err(Refusal::SystemBucket.error(operation.name, bucket.unwrap_or_default()))
            }
            Decision::Refused(refusal) => Err(refusal.error(operation.name, resource)),
        }
    }

    /// Whether some rows may be hidden from it.
    pub(crate) fn has_row_filters(&self) -> bool {
        self.login.as_ref().is_some_and(|login| login.has_row_filters)
    }

    /// The records that those which the caller writes may refer to: the ones that it may read. None if no row is hidden from it.
    pub(crate) fn reference_filter(&self) -> Option<ReferenceFilter> {
        if !self.has_row_filters() {
            return None;
        }
        let caller = self.clone();
        Some(ReferenceFilter::new(move |bucket| match caller.decide(OperationId::get(), Some(bucket), bucket) {
            Decision::Allowed(_, row_filter) => row_filter,
            // Who may not read a bucket at all has no row filter for it. References to it lead where its records are.
            Decision::Refused(_) => None,
        }))
    }

    /// Checks whether the caller may use an operation on anything at all: for requests whose target is not known.
    pub(crate) fn may_ever(&self, operation: &str, resource: &str) -> Result<(), RequestError> {
        let Some((auth, login)) = self.auth.as_ref().zip(self.login.as_ref()) else { return Ok(()) };
        let is_allowed = login.check(auth, operation, resource).unwrap_or_else(|| {
            let tier = OperationId::named(operation).and_then(|operation| operation.tier);
            match self.reach(tier) {
                Reach::Enough => login.grants.may_ever(operation),
                Reach::NeedsRule(_) => login.grants.rules_may_ever_allow(operation),
                Reach::TooLow(_) => false,
            }
        });
        if is_allowed {
            return Ok(());
        }
        let shown: String = operation.chars().take(64).collect();
        Err(RequestError::new(Code::Forbidden, format!("{shown} is not permitted")))
    }
}
