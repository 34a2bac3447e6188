//! The sender of a request and its permissions.
//!
//! The row filter of a caller is added to each of its reads, writes and subscriptions. So a hidden row does not appear in any
//! result, count or page, without special cases.
//!
//! [`Caller::decision`] makes all permission decisions, once the target of a request is known. [`check_tier`](Caller::check_tier) and
//! [`may_ever`](Caller::may_ever) reject earlier the requests that `decision` would deny for every target.

use std::sync::Arc;

use tidewire_store::{Filter, ReferenceFilter};

use super::decision::{AllowReason, Decision, Denial};
use crate::auth::{Access, Grants, Session};
use crate::auth::{Auth, Tier};
use crate::ops::table::{OperationId, Scope};
use crate::{Code, RequestError};

/// A session and its permissions.
#[derive(Debug)]
pub(crate) struct Login {
    pub(crate) session: Session,
    pub(crate) grants: Grants,
    /// The tier of the built-in roles, if the session has one.
    pub(crate) role_tier: Option<Tier>,
    /// Whether a row filter may apply.
    has_row_filters: bool,
}

impl Login {
    pub(crate) fn new(session: Session, auth: &Auth) -> Self {
        let grants = auth.permissions.for_session(&session);
        let (role_tier, has_row_filters) = (session.tier(), grants.have_row_filters());
        Self { session, grants, role_tier, has_row_filters }
    }

    /// Returns the decision of the embedding program, which takes precedence over the permission rules.
    fn check(&self, auth: &Auth, operation: &str, resource: &str) -> Option<bool> {
        auth.check.as_ref()?.check(&self.session, operation, resource)
    }
}

/// The result of comparing the tier of a client with that of an operation.
enum TierCheck {
    Sufficient,
    /// Only a rule for one of the session's roles, or the check of the embedding program, can allow the operation.
    NeedsRule(Tier),
    TooLow(Denial),
}

/// The sender of a request.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    /// `None` if auth is disabled: everything is allowed.
    auth: Option<Arc<Auth>>,
    login: Option<Arc<Login>>,
}

impl Caller {
    pub(crate) fn new(auth: Option<Arc<Auth>>, login: Option<Arc<Login>>) -> Self {
        Self { auth, login }
    }

    /// Returns the user who is logged in.
    pub(crate) fn user_id(&self) -> Option<&str> {
        self.login.as_ref().map(|login| &*login.session.user_id)
    }

    /// Returns the auth options; `None` if auth is disabled.
    pub(super) fn auth(&self) -> Option<&Auth> {
        self.auth.as_deref()
    }

    pub(super) fn login(&self) -> Option<&Login> {
        self.login.as_deref()
    }

    /// Returns whether the caller may use an operation on a bucket, or without one, and why. `resource` is passed to the check of the
    /// embedding program.
    #[inline]
    pub(crate) fn decision(&self, operation: OperationId, bucket: Option<&str>, resource: &str) -> Decision {
        let tier_check = self.compare_tier(operation.tier);
        if let TierCheck::TooLow(denial) = tier_check {
            return Decision::Denied(denial);
        }
        if bucket.is_some_and(|bucket| bucket.starts_with('$')) {
            return Decision::Denied(Denial::SystemBucket);
        }
        let Some(auth) = &self.auth else { return Decision::Allowed(AllowReason::AuthOff, None) };
        let Some(login) = &self.login else { return Decision::Allowed(AllowReason::Anonymous, None) };
        if operation.scope == Scope::Connection {
            return match tier_check {
                TierCheck::NeedsRule(tier) => Decision::Denied(Denial::DefaultTier(tier)),
                _ => Decision::Allowed(AllowReason::OwnConnection, None),
            };
        }
        match login.check(auth, operation.name, resource) {
            Some(true) => return Decision::Allowed(AllowReason::Check, None),
            Some(false) => return Decision::Denied(Denial::Check),
            None => {}
        }
        let by_rules = match operation.scope {
            Scope::Topic => login.grants.rules_allow_topic(operation.name, resource).then_some(Access::All),
            _ => login.grants.rule_access(operation.name, bucket),
        };
        let (reason, access) = match (by_rules, tier_check) {
            (Some(access), _) => (AllowReason::Rules, access),
            (None, TierCheck::NeedsRule(tier)) => return Decision::Denied(Denial::DefaultTier(tier)),
            (None, _) => (AllowReason::Default, login.grants.default_access()),
        };
        match access {
            Access::Denied => Decision::Denied(Denial::Default),
            Access::Rows(_) if operation.scope.affects_all_rows() => Decision::Denied(Denial::AllRows),
            Access::Rows(filter) => Decision::Allowed(reason, Some(filter)),
            Access::All => Decision::Allowed(reason, None),
        }
    }

    fn compare_tier(&self, required: Option<Tier>) -> TierCheck {
        let Some(auth) = &self.auth else { return TierCheck::Sufficient };
        let Some(login) = &self.login else {
            return match (auth.required, required, auth.anonymous_tier) {
                (true, ..) => TierCheck::TooLow(Denial::NotLoggedIn),
                (false, Some(tier), Some(has)) if tier > has => TierCheck::TooLow(Denial::AnonymousTier(tier)),
                _ => TierCheck::Sufficient,
            };
        };
        match (required, login.role_tier) {
            (Some(tier), Some(has)) if tier > has => TierCheck::TooLow(Denial::RoleTier(tier)),
            (Some(tier), None) if tier > auth.default_tier => TierCheck::NeedsRule(tier),
            _ => TierCheck::Sufficient,
        }
    }

    /// Checks, before the target is known, that the caller is logged in if required, and that its tier is sufficient or a rule may allow
    /// the operation. A client that must log in first gets the same error for an unknown operation.
    pub(crate) fn check_tier(&self, operation: Option<OperationId>) -> Result<(), RequestError> {
        let denial = match self.compare_tier(operation.and_then(|operation| operation.tier)) {
            TierCheck::Sufficient => return Ok(()),
            TierCheck::TooLow(denial) => denial,
            TierCheck::NeedsRule(_) if operation.is_some_and(|operation| self.may_be_allowed_above_tier(operation)) => {
                return Ok(());
            }
            TierCheck::NeedsRule(tier) => Denial::DefaultTier(tier),
        };
        Err(denial.error(operation.map_or("", |operation| operation.name), "*"))
    }

    /// Returns whether a rule or the check of the embedding program may allow an operation above the tier of the caller.
    fn may_be_allowed_above_tier(&self, operation: OperationId) -> bool {
        let has_check = self.auth.as_ref().is_some_and(|auth| auth.check.is_some());
        has_check || self.login.as_ref().is_some_and(|login| login.grants.rules_may_ever_allow(operation.name))
    }

    /// Checks whether the caller may use an operation on a bucket, or without one. Returns the filter of the rows that it may access;
    /// `None` for all rows. `resource` is passed to the check of the embedding program.
    #[inline]
    pub(crate) fn authorize(
        &self,
        operation: OperationId,
        bucket: Option<&str>,
        resource: &str,
    ) -> Result<Option<Filter>, RequestError> {
        match self.decision(operation, bucket, resource) {
            Decision::Allowed(_, row_filter) => Ok(row_filter),
            Decision::Denied(Denial::SystemBucket) => {
                Err(Denial::SystemBucket.error(operation.name, bucket.unwrap_or_default()))
            }
            Decision::Denied(denial) => Err(denial.error(operation.name, resource)),
        }
    }

    /// Returns whether a row filter may apply.
    pub(crate) fn has_row_filters(&self) -> bool {
        self.login.as_ref().is_some_and(|login| login.has_row_filters)
    }

    /// Returns the filter of the records to which written records may refer: those that the caller may read. `None` if the caller has
    /// no row filters.
    pub(crate) fn reference_filter(&self) -> Option<ReferenceFilter> {
        if !self.has_row_filters() {
            return None;
        }
        let caller = self.clone();
        Some(ReferenceFilter::new(move |bucket| match caller.decision(OperationId::get(), Some(bucket), bucket) {
            Decision::Allowed(_, row_filter) => row_filter,
            // A bucket that the caller may not read at all has no row filter, and references to it are not restricted.
            Decision::Denied(_) => None,
        }))
    }

    /// Checks whether the caller may use an operation on at least one target. Used when the target of a request is unknown.
    pub(crate) fn may_ever(&self, operation: &str, resource: &str) -> Result<(), RequestError> {
        let Some((auth, login)) = self.auth.as_ref().zip(self.login.as_ref()) else { return Ok(()) };
        let is_allowed = login.check(auth, operation, resource).unwrap_or_else(|| {
            let tier = OperationId::named(operation).and_then(|operation| operation.tier);
            match self.compare_tier(tier) {
                TierCheck::Sufficient => login.grants.may_ever(operation),
                TierCheck::NeedsRule(_) => login.grants.rules_may_ever_allow(operation),
                TierCheck::TooLow(_) => false,
            }
        });
        if is_allowed {
            return Ok(());
        }
        let shown: String = operation.chars().take(64).collect();
        Err(RequestError::new(Code::Forbidden, format!("{shown} is not permitted")))
    }
}
