//! Explanations of permission decisions.
//!
//! An explanation is derived from the same [`Decision`] that a request would get, so the two always agree.

use std::fmt;
use std::sync::Arc;

use serde_json::{Value as Json, json};

use super::caller::{Caller, Login};
use super::decision::{AllowReason, Decision, Denial};
use crate::auth::Grant;
use crate::auth::{Session, Tier};
use crate::ops::table::{OPERATIONS, OperationId, Scope, suggestion};
use crate::{RequestError, ServerOptions};

/// Explains why a client may or may not use an operation. Returned by [`ServerOptions::explain`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Explanation {
    /// The operation.
    pub operation: &'static str,
    /// The bucket, or the topic of an operation of `rules.*`.
    pub bucket: Option<String>,
    /// Whether the operation is allowed, at least on some rows.
    pub is_allowed: bool,
    /// The tier that the operation requires, if any.
    pub required_tier: Option<Tier>,
    /// The tier of the client; `None` if it is not limited by a tier, or if it must log in first.
    pub tier: Option<Tier>,
    /// The source of the client's tier, such as `auth.defaultTier`.
    pub tier_source: String,
    /// The permission rules that apply: their zero-based index in the list of rules, and the rule as in a configuration file.
    pub rules: Vec<(usize, Json)>,
    /// The filter of the rows on which the operation is allowed; `None` for all rows.
    pub row_filter: Option<Json>,
    /// The source of the decision: `authOff`, `login`, `tier`, `connection`, `systemBucket`, `check`, `rules` or `default`.
    pub decided_by: &'static str,
    /// The reason as a sentence.
    pub reason: String,
}

impl ServerOptions {
    /// Explains whether a session, or a client without a login, may use an operation on a bucket. If `bucket` is `None` but the
    /// operation needs one, the explanation is for a bucket that no rule names. For a `rules.*` operation, `bucket` is a topic.
    ///
    /// ```
    /// use tidewire::auth::{Auth, Session, StaticToken, StaticTokens, Tier};
    /// use tidewire::ServerOptions;
    ///
    /// let tokens = StaticTokens::new([("1f0c8a52", StaticToken::new("mara", ["diver"]))])?;
    /// let options = ServerOptions::default().auth(Auth::new(tokens));
    /// let mara = Session::new("mara", ["diver"]);
    /// assert!(options.explain(Some(&mara), "store.insert", Some("boats"))?.is_allowed);
    /// let explanation = options.explain(Some(&mara), "store.dropBucket", Some("boats"))?;
    /// assert_eq!((explanation.is_allowed, explanation.tier), (false, Some(Tier::Write)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Returns an error if the operation does not exist.
    pub fn explain(
        &self,
        session: Option<&Session>,
        operation: &str,
        bucket: Option<&str>,
    ) -> Result<Explanation, RequestError> {
        let auth = self.auth.clone().map(Arc::new);
        let login = session.zip(auth.as_ref()).map(|(session, auth)| Arc::new(Login::new(session.clone(), auth)));
        Ok(Caller::new(auth, login).explain(operation_named(operation)?, bucket))
    }
}

/// Returns the operation with this name, or an error with a suggestion.
pub(crate) fn operation_named(name: &str) -> Result<OperationId, RequestError> {
    OperationId::named(name).ok_or_else(|| {
        let shown: String = name.chars().take(64).collect();
        RequestError::invalid(format!("unknown operation \"{shown}\"{}", suggestion(&shown, OPERATIONS.iter())))
    })
}

impl Caller {
    /// Explains whether the caller may use an operation on a bucket, or on a topic.
    pub(crate) fn explain(&self, operation: OperationId, bucket: Option<&str>) -> Explanation {
        let resource = bucket.unwrap_or("*");
        let decision = match operation.scope {
            _ if operation.tier.is_none() => Decision::Allowed(AllowReason::OwnConnection, None),
            Scope::Topic => self.decision(operation, None, resource),
            _ => self.decision(operation, bucket, resource),
        };
        let (tier, tier_source) = self.tier_and_source();
        let rules = self.matching_rules(operation, bucket);
        let reason = ReasonFormatter { caller: self, operation, bucket, rules: &rules }.format(&decision);
        let (is_allowed, decided_by, row_filter) = match decision {
            Decision::Allowed(allow_reason, row_filter) => (true, allow_reason.name(), row_filter),
            Decision::Denied(denial) => (false, denial.name(), None),
        };
        Explanation {
            operation: operation.name,
            bucket: bucket.map(str::to_owned),
            is_allowed,
            required_tier: operation.tier,
            tier,
            tier_source,
            rules: rules.iter().map(|grant| (grant.index, grant.rule.to_json())).collect(),
            row_filter: row_filter.map(|filter| filter.to_json()),
            decided_by,
            reason,
        }
    }

    fn tier_and_source(&self) -> (Option<Tier>, String) {
        let Some(auth) = self.auth() else { return (None, "auth is off".to_owned()) };
        match self.login() {
            None if auth.required => (None, "not logged in".to_owned()),
            None if auth.anonymous_tier.is_none() => (None, "auth.anonymousTier is not set".to_owned()),
            None => (auth.anonymous_tier, "auth.anonymousTier".to_owned()),
            Some(login) => match login.role_tier {
                Some(tier) => (Some(tier), format!("role {}", tier.role())),
                None => (Some(auth.default_tier), "auth.defaultTier".to_owned()),
            },
        }
    }

    fn matching_rules(&self, operation: OperationId, bucket: Option<&str>) -> Vec<&Grant> {
        let Some(login) = self.login() else { return Vec::new() };
        match operation.scope {
            Scope::Connection => Vec::new(),
            Scope::Topic => login.grants.matching_topic(operation.name, bucket.unwrap_or("*")).collect(),
            _ => login.grants.matching(operation.name, bucket).collect(),
        }
    }
}

impl AllowReason {
    fn name(self) -> &'static str {
        match self {
            Self::AuthOff => "authOff",
            Self::Anonymous => "tier",
            Self::OwnConnection => "connection",
            Self::Check => "check",
            Self::Rules => "rules",
            Self::Default => "default",
        }
    }
}

impl Denial {
    fn name(self) -> &'static str {
        match self {
            Self::NotLoggedIn => "login",
            Self::AnonymousTier(_) | Self::RoleTier(_) | Self::DefaultTier(_) => "tier",
            Self::SystemBucket => "systemBucket",
            Self::Check => "check",
            Self::Default => "default",
            Self::AllRows => "rules",
        }
    }
}

/// Formats the reason of a decision as a sentence.
struct ReasonFormatter<'a> {
    caller: &'a Caller,
    operation: OperationId,
    bucket: Option<&'a str>,
    rules: &'a [&'a Grant],
}

impl ReasonFormatter<'_> {
    fn format(&self, decision: &Decision) -> String {
        let name = self.operation.name;
        let reason = match decision {
            Decision::Allowed(allow_reason, row_filter) => {
                self.format_allow_reason(*allow_reason, row_filter.is_some())
            }
            Decision::Denied(denial) => self.format_denial(*denial),
        };
        match (self.operation.scope, decision) {
            (Scope::Steps, Decision::Allowed(AllowReason::Check | AllowReason::Rules | AllowReason::Default, _)) => {
                format!("{reason}; each operation in {name} also needs its own permission")
            }
            _ => reason,
        }
    }

    fn format_allow_reason(&self, reason: AllowReason, is_restricted: bool) -> String {
        let rows = if is_restricted { "on the rows that match the row filter" } else { "on all rows" };
        match reason {
            AllowReason::AuthOff => "auth is off: every client may do everything".to_owned(),
            AllowReason::Anonymous => match self.caller.auth().and_then(|auth| auth.anonymous_tier) {
                Some(tier) => {
                    format!("no login is required, and clients without one have the tier {}", tier.name())
                }
                None => "no login is required, and auth.anonymousTier is not set: clients without a login may do \
                         everything"
                    .to_owned(),
            },
            AllowReason::OwnConnection => {
                "it affects only the client's own connection and needs no permission".to_owned()
            }
            AllowReason::Check => "the permission check of the embedding program allows it, on all rows".to_owned(),
            AllowReason::Rules if self.operation.scope.names_bucket() => {
                format!("{} it, {rows}", self.describe_rules())
            }
            AllowReason::Rules => format!("{} it", self.describe_rules()),
            AllowReason::Default => {
                let target = self.target();
                format!("no rule of the session's roles covers {target}, and the default is to allow")
            }
        }
    }

    fn format_denial(&self, denial: Denial) -> String {
        let (name, target) = (self.operation.name, self.target());
        let (tier_of_client, source) = self.caller.tier_and_source();
        let has = tier_of_client.map_or("none", Tier::name);
        match denial {
            Denial::NotLoggedIn => "a login is required".to_owned(),
            Denial::AnonymousTier(tier) => {
                format!("{name} needs the tier {}, and clients without a login have {has} ({source})", tier.name())
            }
            Denial::RoleTier(tier) => format!(
                "{name} needs the tier {}, and the session has {has} ({source}); rules cannot raise the tier of a built-in role",
                tier.name()
            ),
            Denial::DefaultTier(tier) => format!(
                "{name} needs the tier {}, the session has {has} ({source}), and no rule of its roles covers {target}{}",
                tier.name(),
                self.other_buckets_hint()
            ),
            Denial::SystemBucket => "the bucket is a system bucket".to_owned(),
            Denial::Check => "the permission check of the embedding program denies it".to_owned(),
            Denial::Default => {
                let hint = self.other_buckets_hint();
                format!("no rule of the session's roles covers {target}, and the default is to deny{hint}")
            }
            Denial::AllRows => {
                format!("{name} affects all rows, and {} it only on rows that match a filter", self.describe_rules())
            }
        }
    }

    fn target(&self) -> String {
        let name = self.operation.name;
        match self.bucket {
            Some(bucket) => format!("{name} on \"{bucket}\""),
            None if self.operation.scope.names_bucket() => format!("{name} on buckets that no rule names"),
            None => name.to_owned(),
        }
    }

    fn describe_rules(&self) -> String {
        let one = |grant: &&Grant| format!("{} (role \"{}\")", grant.index, grant.rule.role());
        let list: Vec<String> = self.rules.iter().map(one).collect();
        match &list[..] {
            [only] => format!("rule {only} allows"),
            several => format!("the rules {} allow", several.join(", ")),
        }
    }

    /// Returns a hint that lists the buckets for which rules of the session allow the operation.
    fn other_buckets_hint(&self) -> String {
        let Some(login) = self.caller.login() else { return String::new() };
        match login.grants.buckets(self.operation.name) {
            buckets if buckets.is_empty() => String::new(),
            buckets => format!("; its rules name the buckets {}", buckets.join(", ")),
        }
    }
}

impl Explanation {
    pub(crate) fn to_json(&self) -> Json {
        let rule = |(index, rule): &(usize, Json)| {
            let mut json = json!({"index": index});
            if let (Some(members), Json::Object(rule)) = (json.as_object_mut(), rule) {
                members.extend(rule.clone());
            }
            json
        };
        json!({
            "allowed": self.is_allowed,
            "tier": {
                "required": self.required_tier.map(Tier::name),
                "has": self.tier.map(Tier::name),
                "source": self.tier_source,
            },
            "rules": self.rules.iter().map(rule).collect::<Vec<_>>(),
            "rowFilter": self.row_filter,
            "decidedBy": self.decided_by,
            "reason": self.reason,
        })
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.is_allowed { "allowed" } else { "not allowed" };
        let target = self.bucket.as_ref().map(|bucket| format!(" on \"{bucket}\"")).unwrap_or_default();
        writeln!(f, "{}{target}: {verdict}", self.operation)?;
        writeln!(f, "  reason:  {}", self.reason)?;
        let name = |tier: Option<Tier>| tier.map_or("none", Tier::name);
        writeln!(
            f,
            "  tier:    {} required, has {} ({})",
            name(self.required_tier),
            name(self.tier),
            self.tier_source
        )?;
        for (index, rule) in &self.rules {
            writeln!(f, "  rule {index:<3} {rule}")?;
        }
        match &self.row_filter {
            Some(filter) => writeln!(f, "  rows:    {filter}"),
            None if self.is_allowed => writeln!(f, "  rows:    all"),
            None => Ok(()),
        }
    }
}
