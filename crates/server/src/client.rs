//! In-process clients: the second transport besides WebSocket.
//!
//! Requests take the same path as those from a socket (`ops/handler.rs`), with the same checks, limits and metrics.

use std::collections::HashMap;
use std::fmt;
use std::future::poll_fn;
use std::marker::PhantomData;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json, json};
use tidewire_conn::MemoryHold;

use crate::auth::Session;
use crate::ops::HandlerReply;
use crate::ops::handler::handle;
use crate::protocol::disconnect::Disconnect;
use crate::protocol::request::ClientMessage;
use crate::push::sink::PushSink;
use crate::push::subscription::Subscription;
use crate::session::caller::Login;
use crate::session::connection::Connection;
use crate::state::ServerState;
use crate::{Code, RequestError};

/// A client in the same process as the server.
///
/// It has the same operations, permissions, limits and metrics as a client over a socket. Clones share one connection; when the last
/// clone is dropped, its subscriptions end. A client may be used from any thread and executor while the runtime on which the server
/// was started is running.
///
/// ```
/// use serde_json::{Value as Json, json};
/// use tidewire::{Server, ServerOptions};
/// use tidewire_store::{Store, StoreOptions};
///
/// # tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
/// let server = Server::start(Store::memory(StoreOptions::default()), ServerOptions::default().port(0)).await?;
/// let client = server.client(None);
/// let config = json!({"key": "id", "schema": {"id": {"type": "string"}}});
/// client.request::<Json>("store.defineBucket", json!({"name": "tides", "config": config})).await?;
/// let mut tides = client.subscribe::<Vec<Json>>(json!({"config": {"bucket": "tides"}})).await?;
/// client.insert::<Json>("tides", json!({"id": "Brest", "metres": 4.2})).await?;
/// let push = tides.next().await?;
/// assert_eq!(push.data.unwrap()[0]["metres"], 4.2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # }).unwrap();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Client {
    inner: Arc<ClientInner>,
}

#[derive(Debug)]
struct ClientInner {
    connection: Arc<Connection>,
    sink: Arc<LocalSink>,
    /// Held by [exclusive](crate::ops::table::Operation::is_exclusive) requests, which must run one at a time even if clones send several.
    exclusive: tokio::sync::Mutex<()>,
}

impl Client {
    /// Creates a client with a session, or without a login.
    pub(crate) fn new(server: &Arc<ServerState>, session: Option<Session>) -> Self {
        let sink = Arc::new(LocalSink::default());
        let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let shared: Arc<dyn PushSink> = Arc::clone(&sink) as Arc<dyn PushSink>;
        let connection = Arc::new(Connection::new(server, server.next_local_client(), address, shared));
        let mut is_revoked = false;
        if let (Some(session), Some(auth)) = (session, &server.auth) {
            is_revoked = server.revocations.is_revoked(&session.user_id, server.store.now());
            connection.set_login(Some(Arc::new(Login::new(session, auth))));
        }
        server.add_connection(&connection);
        if server.is_stopped() {
            connection.close(Disconnect::SERVER_SHUTDOWN);
        } else if is_revoked {
            connection.close(Disconnect::SESSION_REVOKED);
        }
        Self { inner: Arc::new(ClientInner { connection, sink, exclusive: tokio::sync::Mutex::default() }) }
    }

    /// Sends a request for an operation. `params` must serialize to an object, or to null for no parameters. Returns the `data` of the
    /// result; a result without data is deserialized from `null`.
    ///
    /// Dropping the future cancels the request. A write may still be committed.
    pub async fn request<T: DeserializeOwned>(
        &self,
        operation: &str,
        params: impl Serialize,
    ) -> Result<T, RequestError> {
        let connection = &self.inner.connection;
        let text = encode_request(operation, params)?;
        let ClientMessage::Request(request) = ClientMessage::parse(&text)? else {
            return Err(RequestError::invalid("\"pong\" is not an operation"));
        };
        let is_exclusive = request.operation.is_some_and(|operation| operation.is_exclusive());
        let _exclusive = if is_exclusive { Some(self.inner.exclusive.lock().await) } else { None };
        // The caller may run outside the runtime of the server.
        let runtime = &connection.server.runtime;
        let reply = {
            let _context = runtime.enter();
            handle(&connection.server, connection, &request)
        };
        let outcome = match reply {
            Ok(HandlerReply::Ready(data)) => Ok(data),
            Ok(HandlerReply::Pending(mut reply)) => {
                poll_fn(|context| {
                    let _context = runtime.enter();
                    reply.as_mut().poll(context)
                })
                .await
            }
            Err(error) => Err(error),
        };
        decode_data(outcome.map_err(|error| self.redacted(error))?.into_text().as_deref())
    }

    /// Removes the details of an error unless `expose_error_details` is set.
    fn redacted(&self, error: RequestError) -> RequestError {
        let is_exposed = self.inner.connection.server.options.expose_error_details;
        RequestError { details: error.details.filter(|_| is_exposed), ..error }
    }

    /// Returns the record with a key (`store.get`).
    pub async fn get<T: DeserializeOwned>(&self, bucket: &str, key: impl Serialize) -> Result<Option<T>, RequestError> {
        self.request("store.get", json!({"bucket": bucket, "key": to_json(key)?})).await
    }

    /// Inserts a record, and returns it with its generated fields (`store.insert`).
    pub async fn insert<T: DeserializeOwned>(&self, bucket: &str, record: impl Serialize) -> Result<T, RequestError> {
        self.request("store.insert", json!({"bucket": bucket, "data": to_json(record)?})).await
    }

    /// Merges fields into a record, and returns it (`store.update`).
    pub async fn update<T: DeserializeOwned>(
        &self,
        bucket: &str,
        key: impl Serialize,
        fields: impl Serialize,
    ) -> Result<T, RequestError> {
        let params = json!({"bucket": bucket, "key": to_json(key)?, "data": to_json(fields)?});
        self.request("store.update", params).await
    }

    /// Deletes a record, if it exists (`store.delete`).
    pub async fn delete(&self, bucket: &str, key: impl Serialize) -> Result<(), RequestError> {
        self.request::<Json>("store.delete", json!({"bucket": bucket, "key": to_json(key)?})).await.map(drop)
    }

    /// Runs a query (`store.query`).
    pub async fn query<T: DeserializeOwned>(&self, query: impl Serialize) -> Result<T, RequestError> {
        self.request("store.query", query).await
    }

    /// Subscribes to a query with the parameters of `store.subscribe`. `T` is the type of the data of a push: the result of the query, or a
    /// delta with `"mode":"delta"`. Use [`first`](ClientSubscription::first) for the initial result.
    pub async fn subscribe<T: DeserializeOwned>(
        &self,
        params: impl Serialize,
    ) -> Result<ClientSubscription<T>, RequestError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Reply {
            subscription_id: String,
            #[serde(rename = "pos")]
            position: Option<String>,
            data: Option<Json>,
            resumed: Option<bool>,
        }
        let reply: Reply = self.request("store.subscribe", params).await?;
        let number = reply.subscription_id.strip_prefix("sub-").and_then(|number| number.parse().ok());
        let subscription = number.and_then(|number| self.inner.connection.subscription(number));
        let subscription = subscription.ok_or_else(RequestError::shutting_down)?;
        Ok(ClientSubscription {
            client: self.clone(),
            subscription,
            first: reply.data,
            position: reply.position,
            is_resumed: reply.resumed.unwrap_or_default(),
            has_ended: false,
            result: PhantomData,
        })
    }
}

impl Drop for ClientInner {
    fn drop(&mut self) {
        self.connection.close(Disconnect::NORMAL_CLOSURE);
        self.connection.server.remove_connection(&self.connection);
    }
}

/// A subscription of a [`Client`]. Dropping it unsubscribes.
///
/// Pushes are not queued: a slow reader receives the newest result only, or a `reset` instead of the deltas that it missed.
pub struct ClientSubscription<T> {
    client: Client,
    subscription: Arc<Subscription>,
    first: Option<Json>,
    position: Option<String>,
    is_resumed: bool,
    has_ended: bool,
    result: PhantomData<fn() -> T>,
}

/// A push to a [`ClientSubscription`].
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct ClientPush<T> {
    /// The new result or delta. `None` if an aggregate has no value, such as the minimum of no numbers.
    #[serde(default = "Option::default")]
    pub data: Option<T>,
    /// The position of the last commit that is included, if the subscription has positions.
    #[serde(default, rename = "pos")]
    pub position: Option<String>,
}

impl<T: DeserializeOwned> ClientSubscription<T> {
    /// Returns the data of the reply to the subscribe request: a snapshot of the result, or a delta if the subscription was
    /// [resumed](Self::is_resumed).
    pub fn first<F: DeserializeOwned>(&self) -> Result<Option<F>, RequestError> {
        self.first.clone().map(serde_json::from_value).transpose().map_err(RequestError::invalid)
    }

    /// Returns the position of the first result, if the subscription has positions.
    pub fn position(&self) -> Option<&str> {
        self.position.as_deref()
    }

    /// Returns whether the first result is a delta from the position in `since`.
    pub fn is_resumed(&self) -> bool {
        self.is_resumed
    }

    /// Waits for the next push. Returns an error when the subscription has ended.
    ///
    /// # Cancel safety
    ///
    /// This method is cancel safe: no push is lost if the future is dropped.
    pub async fn next(&mut self) -> Result<ClientPush<T>, RequestError> {
        poll_fn(|context| self.poll_next(context)).await
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Result<ClientPush<T>, RequestError>> {
        if self.has_ended {
            return Poll::Ready(Err(ended()));
        }
        // The waker is registered before the poll, so that no wake-up is missed.
        self.client.inner.sink.register(self.subscription.number, context.waker());
        if let Some(error) = self.client.inner.connection.closed_error() {
            self.has_ended = true;
            return Poll::Ready(Err(error));
        }
        match self.subscription.poll_push(&self.client.inner.connection) {
            // The subscription was cancelled by its id, or because the connection was closed. A connection records its error before it
            // cancels its subscriptions.
            Poll::Pending if self.subscription.has_ended() => {
                self.has_ended = true;
                Poll::Ready(Err(self.client.inner.connection.closed_error().unwrap_or_else(ended)))
            }
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(body)) => {
                let text = format!("{{{}", body.body());
                Poll::Ready(serde_json::from_str(&text).map_err(RequestError::invalid))
            }
            Poll::Ready(Err(error)) => {
                self.has_ended = true;
                self.client.inner.connection.remove_subscription(self.subscription.number);
                Poll::Ready(Err(error))
            }
        }
    }
}

impl<T> Drop for ClientSubscription<T> {
    fn drop(&mut self) {
        self.client.inner.connection.unsubscribe(self.subscription.number);
        self.client.inner.sink.unregister(self.subscription.number);
    }
}

impl<T> fmt::Debug for ClientSubscription<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientSubscription").field("number", &self.subscription.number).finish_non_exhaustive()
    }
}

fn ended() -> RequestError {
    RequestError::new(Code::NotFound, "the subscription has ended")
}

/// The push sink of an in-process client. It only wakes the task that waits for a subscription; the push itself is encoded when the
/// client polls.
#[derive(Debug, Default)]
struct LocalSink {
    wakers: Mutex<HashMap<u64, Waker>>,
}

impl LocalSink {
    fn wakers(&self) -> MutexGuard<'_, HashMap<u64, Waker>> {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn register(&self, subscription: u64, waker: &Waker) {
        // Dropped after the lock is released.
        let previous = self.wakers().insert(subscription, waker.clone());
        drop(previous);
    }

    fn unregister(&self, subscription: u64) {
        let previous = self.wakers().remove(&subscription);
        drop(previous);
    }
}

impl PushSink for LocalSink {
    fn wake(&self, subscription: u64) {
        // The lock is released before the task is woken.
        let waker = self.wakers().remove(&subscription);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn discard_unsent(&self, _: u64) -> bool {
        false
    }

    fn hold(&self, _: usize) -> Option<MemoryHold> {
        None
    }

    fn close(&self, _: Disconnect) {
        let wakers = std::mem::take(&mut *self.wakers());
        wakers.into_values().for_each(Waker::wake);
    }
}

/// Encodes a request as the text that a client would send over a socket.
fn encode_request(operation: &str, params: impl Serialize) -> Result<String, RequestError> {
    let mut members = match to_json(params)? {
        Json::Object(members) => members,
        Json::Null => Map::new(),
        _ => return Err(RequestError::invalid("the parameters of a request must be an object")),
    };
    members.insert("id".to_owned(), json!(0));
    members.insert("type".to_owned(), json!(operation));
    Ok(Json::Object(members).to_string())
}

fn to_json(value: impl Serialize) -> Result<Json, RequestError> {
    serde_json::to_value(value).map_err(RequestError::invalid)
}

/// Deserializes the data of a result.
fn decode_data<T: DeserializeOwned>(text: Option<&[u8]>) -> Result<T, RequestError> {
    serde_json::from_slice(text.unwrap_or(b"null"))
        .map_err(|error| RequestError::invalid(format!("the result does not have the expected type: {error}")))
}
