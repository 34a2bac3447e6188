//! One request, from its parameters to its reply: log in, permit, limit, do, answer.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use serde_json::{Value as Json, json};
use tidewire_conn::{ConnectionContext, Message, Reply};
use tidewire_store::{Cause, Filter, StoreError};

use crate::ops::command::{Change, Command, Followed, Read, Write};
use crate::ops::store_reads::Reading;
use crate::ops::store_writes;
use crate::ops::table::Operation;
use crate::protocol::reply::{self, Data, Outcome};
use crate::protocol::request::{Id, Request};
use crate::session::caller::{Caller, Login};
use crate::session::connection::{Connection, ConnectionInfo};
use crate::session::rate_limit::RateKey;
use crate::state::Core;
use crate::transport::websocket::WireReply;
use crate::{Code, RequestError};

/// One request of a connection.
#[derive(Debug)]
pub(crate) struct Serving {
    pub(crate) core: Arc<Core>,
    pub(crate) connection: Arc<Connection>,
    id: Id,
    began: Instant,
}

/// A request that may be done.
struct Admitted<'a> {
    operation: Operation,
    command: Command<'a>,
    caller: Caller,
    /// Which rows it may touch: all if there is no filter.
    rows: Option<Filter>,
}

impl Serving {
    pub(crate) fn new(core: Arc<Core>, connection: Arc<Connection>, id: Id) -> Self {
        Self { core, connection, id, began: Instant::now() }
    }

    /// Serves it: at once, or later.
    pub(crate) fn serve(self, request: &Request<'_>, context: &ConnectionContext) -> WireReply {
        self.core.counters.requests.fetch_add(1, Relaxed);
        match self.admit(request) {
            Ok(admitted) => self.route(admitted, context),
            Err(error) => Reply::Frame(self.reply(Err(error), &request.name)),
        }
    }

    /// All that comes before a request is done.
    fn admit<'a>(&self, request: &Request<'a>) -> Result<Admitted<'a>, RequestError> {
        let (core, name) = (&*self.core, &*request.name);
        let named = Operation::named(name);
        let is_auth = name.starts_with("auth.");
        let now = || core.store.now();
        let mut login = self.connection.login();
        if !is_auth && let Some(login) = login.take_if(|login| login.session.is_expired(now())) {
            return Err(self.expire(&login));
        }
        let user = login.clone();
        let caller = Caller::new(core.auth.clone(), login);
        let is_free = is_auth || name == "ping";
        if !is_free {
            caller.enter(named)?;
        }
        let operation = named.filter(|operation| operation.is_served(core.auth.is_some()));
        let command = operation.map(|operation| (operation, Command::parse(operation, &request.params)));
        let (command, rows) = match command {
            None => {
                // Whoever may not use it does not learn whether there is such a thing.
                if !is_free {
                    caller.may_ever(name, "*")?;
                }
                (Err(unknown(name, core.auth.is_some())), None)
            }
            Some((operation, Ok(mut command))) => {
                let rows = self.permit(&caller, operation, &mut command)?;
                (Ok((operation, command)), rows)
            }
            Some((operation, Err(error))) => {
                if !is_free && operation != Operation::StoreUnsubscribe {
                    caller.may_ever(name, "*")?;
                }
                (Err(error), None)
            }
        };
        self.limit(user.as_deref())?;
        command.map(|(operation, command)| Admitted { operation, command, caller, rows })
    }

    /// A session is over: its first late request finds out.
    fn expire(&self, login: &Login) -> RequestError {
        tracing::debug!(connection = %self.connection, user = login.session.user_id, "a session has expired");
        let error = RequestError::new(Code::Unauthorized, "Session expired");
        let is_required = self.core.requires_auth();
        self.connection.set_login(None, is_required);
        if is_required {
            for forward in self.connection.subscriptions() {
                forward.revoke(&error);
            }
        }
        error
    }

    /// Whether the caller may do this, and with which rows.
    fn permit(
        &self,
        caller: &Caller,
        operation: Operation,
        command: &mut Command<'_>,
    ) -> Result<Option<Filter>, RequestError> {
        match command {
            Command::Read(read) => {
                let bucket = read.bucket();
                caller.rows(operation, bucket, bucket.unwrap_or("*"))
            }
            Command::Write(write) => self.permit_change(caller, operation, &mut write.change),
            Command::Subscribe(subscribe) => self.may_follow(caller, &subscribe.query),
            Command::Rules { topic } => caller.topic(operation, topic).map(|()| None),
            Command::Unsubscribe { .. } | Command::Login { .. } | Command::Logout | Command::Whoami => Ok(None),
            _ => caller.rows(operation, None, "*"),
        }
    }

    fn permit_change(
        &self,
        caller: &Caller,
        operation: Operation,
        change: &mut Change,
    ) -> Result<Option<Filter>, RequestError> {
        match change {
            Change::Transaction(steps) => {
                for step in steps {
                    step.guard = caller.rows(operation, Some(&step.bucket), &step.bucket)?;
                }
                Ok(None)
            }
            // A query that is there counts with its bucket.
            Change::UndefineQuery { name } => caller.rows(operation, self.bucket_of(name).as_deref(), name),
            Change::DefineQuery { name, config } => {
                caller.rows(operation, config.get("bucket").and_then(Json::as_str), name)
            }
            change => caller.rows(operation, change.bucket(), change.bucket().unwrap_or("*")),
        }
    }

    /// Whether the caller may follow a query, and which rows of it.
    pub(crate) fn may_follow(&self, caller: &Caller, query: &Followed) -> Result<Option<Filter>, RequestError> {
        let operation = Operation::StoreSubscribe;
        let name = match query {
            Followed::Inline(query) => return caller.rows(operation, Some(&query.bucket), &query.bucket),
            Followed::Named { name, .. } => name,
        };
        if let Some(buckets) = self.core.host.buckets(name) {
            if buckets.is_empty() {
                return caller.rows(operation, None, name).map(|_| None);
            }
            for bucket in buckets {
                caller.rows(operation, Some(bucket), name)?;
            }
            return Ok(None);
        }
        match self.bucket_of(name) {
            Some(bucket) => caller.rows(operation, Some(&bucket), name),
            // Whoever may follow nothing does not learn what there is.
            None => caller.may_ever(operation.name(), name).map(|()| None),
        }
    }

    /// The bucket of a named query.
    pub(crate) fn bucket_of(&self, query: &str) -> Option<String> {
        let config = self.core.store.snapshot().state.query_config(query).ok()?;
        config.get("bucket").and_then(Json::as_str).map(str::to_owned)
    }

    fn limit(&self, login: Option<&Login>) -> Result<(), RequestError> {
        let Some(rate) = &self.core.rate else { return Ok(()) };
        let address = RateKey::Address(self.connection.address);
        let key = login.map_or(address, |login| RateKey::User(&login.session.user_id));
        rate.take(key, self.core.store.now()).map_err(|retry_after| {
            self.core.counters.rate_limited.fetch_add(1, Relaxed);
            let message = format!("Rate limit exceeded: try again in {retry_after} ms");
            RequestError::new(Code::RateLimited, message).with_details(json!({"retryAfterMs": retry_after}))
        })
    }

    fn route(self, admitted: Admitted<'_>, context: &ConnectionContext) -> WireReply {
        let Admitted { operation, command, caller, rows } = admitted;
        let name = operation.name();
        let outcome = match command {
            Command::Read(read) => self.read(read, rows),
            Command::Write(write) => {
                if let Change::DefineQuery { name: query, .. } = &write.change
                    && self.core.host.has(query)
                {
                    let taken = StoreError::QueryExists { query: query.clone() };
                    return Reply::Frame(self.reply(Err(taken.into()), name));
                }
                self.connection.outlet.tie(context.ticket());
                return self.write(*write, &caller, rows, name);
            }
            Command::Subscribe(subscribe) => {
                self.connection.outlet.tie(context.ticket());
                let serving = Arc::new(self);
                return Arc::clone(&serving)
                    .later(name, async move { serving.subscribe(*subscribe, caller, rows).await });
            }
            Command::Login { token } => {
                let serving = Arc::new(self);
                return Arc::clone(&serving).later(name, async move { serving.login(&token).await });
            }
            Command::Logout => {
                let serving = Arc::new(self);
                return Arc::clone(&serving).later(name, async move { serving.logout().await });
            }
            Command::Unsubscribe { subscription } => self.unsubscribe(&subscription),
            Command::Whoami => Ok(Data::json(&self.whoami())),
            Command::ServerStats => self.bounded(&self.core.server_stats()),
            Command::ServerConnections => self.bounded(&self.core.rows().iter().map(ConnectionInfo::to_json).collect()),
            Command::Rules { .. } => Err(no_rules()),
        };
        Reply::Frame(self.reply(outcome, name))
    }

    fn read(&self, read: Read<'_>, rows: Option<Filter>) -> Outcome {
        match read {
            Read::Stats => self.bounded(&self.core.store_stats()),
            Read::Queries => self.bounded(&self.core.queries()),
            read => {
                let snapshot = self.core.store.snapshot();
                let max_bytes = self.core.options.max_result_bytes;
                Reading { snapshot: &snapshot, store: &self.core.store, rows, max_bytes }.answer(read)
            }
        }
    }

    /// An answer about the server, which is as long as others at most.
    fn bounded(&self, value: &Json) -> Outcome {
        Data::json(value).within(self.core.options.max_result_bytes)
    }

    /// It has its place among the writes from here on, if there is room; its reply comes when it is kept.
    fn write(self, write: Write, caller: &Caller, rows: Option<Filter>, name: &'static str) -> WireReply {
        let user = write.once.as_ref().map(|_| caller.user_id().to_owned()).unwrap_or_default();
        let cause = Cause::of(self.connection.number);
        let max = self.core.options.max_result_bytes;
        let work = move |draft: &mut tidewire_store::Draft| store_writes::run(write, &user, rows.as_ref(), max, draft);
        let pending = self.core.store.write_as(cause, work);
        let limit = self.core.options.request_timeout;
        Reply::future(async move {
            let outcome = match tokio::time::timeout(limit, pending).await {
                Ok(done) => done.map(|done| done.data()).map_err(RequestError::from),
                Err(_) => Err(self.timed_out("whether it will be is unknown")),
            };
            Ok(self.reply(outcome, name))
        })
    }

    /// A reply that takes its time; whatever comes after it waits.
    fn later(self: Arc<Self>, name: &'static str, work: impl Future<Output = Outcome> + Send + 'static) -> WireReply {
        Reply::future(async move {
            let done = tokio::time::timeout(self.core.options.request_timeout, work).await;
            let outcome = done.unwrap_or_else(|_| Err(self.timed_out("try again")));
            Ok(self.reply(outcome, name))
        })
    }

    fn timed_out(&self, and: &str) -> RequestError {
        self.core.counters.timed_out.fetch_add(1, Relaxed);
        let limit = self.core.options.request_timeout.as_millis();
        RequestError::new(Code::Timeout, format!("not done within {limit} ms: {and}"))
    }

    fn reply(&self, outcome: Outcome, name: &str) -> Message {
        let took = self.began.elapsed();
        if took >= self.core.options.slow_request {
            self.core.counters.slow.fetch_add(1, Relaxed);
            let millis = took.as_millis();
            tracing::warn!(connection = %self.connection, id = %self.id, operation = name, millis, "a slow request");
        }
        match outcome {
            Ok(data) => data.into_result(self.id),
            Err(error) => {
                self.core.counters.failed.fetch_add(1, Relaxed);
                let (connection, id, code) = (&self.connection, self.id, error.code.as_str());
                if let Some(fault) = &error.fault {
                    tracing::error!(%connection, %id, operation = name, fault, "a request failed by our own fault");
                } else {
                    tracing::debug!(%connection, %id, operation = name, code, error = %error.message, "a request failed");
                }
                reply::error(self.id, &error, self.core.options.expose_error_details)
            }
        }
    }
}

impl Operation {
    /// Whether this server has it.
    fn is_served(self, has_auth: bool) -> bool {
        match self {
            Self::AuthLogin | Self::AuthLogout | Self::AuthWhoami => has_auth,
            Self::AuditQuery
            | Self::ProceduresRegister
            | Self::ProceduresUnregister
            | Self::ProceduresUpdate
            | Self::ProceduresGet
            | Self::ProceduresList
            | Self::ProceduresCall => false,
            _ => true,
        }
    }
}

fn no_rules() -> RequestError {
    RequestError::new(Code::RulesNotAvailable, "this server has no rule engine")
}

/// There is no such operation; there may be one that is called nearly so.
fn unknown(name: &str, has_auth: bool) -> RequestError {
    /// Longer than the longest name by more than anybody mistypes.
    const LONGEST: usize = 48;
    if name.starts_with("rules.") {
        return no_rules();
    }
    if name.chars().count() > LONGEST {
        let begins: String = name.chars().take(LONGEST).collect();
        return RequestError::new(Code::UnknownOperation, format!("Unknown operation \"{begins}…\""));
    }
    let unavailable = [
        ("auth.", "this server has no logins"),
        ("audit.", "this version keeps no audit log"),
        ("procedures.", "this version has no procedures"),
        ("identity.", "this version has no users of its own"),
    ];
    let why = unavailable.iter().find(|(prefix, _)| name.starts_with(prefix) && !(has_auth && *prefix == "auth."));
    if let Some((_, why)) = why {
        return RequestError::new(Code::UnknownOperation, format!("Unknown operation \"{name}\": {why}"));
    }
    let served = Operation::ALL.iter().filter(|operation| operation.is_served(has_auth));
    let distance =
        |operation: &&Operation| strsim::damerau_levenshtein(&name.to_lowercase(), &operation.name().to_lowercase());
    let nearest = served.min_by_key(distance).map(|operation| operation.name()).unwrap_or_default();
    RequestError::new(
        Code::UnknownOperation,
        format!("Unknown operation \"{name}\": the nearest that there is is \"{nearest}\""),
    )
}
