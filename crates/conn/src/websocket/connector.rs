//! A connector for WebSocket clients.

use std::io;

use super::{ClientHandshake, connect};
use crate::client::{Connect, Connected};

/// A connector that performs the WebSocket handshake on the connections of another connector.
#[derive(Debug, Clone)]
pub struct WebSocketConnector<C> {
    inner: C,
    handshake: ClientHandshake,
}

impl<C: Connect> WebSocketConnector<C> {
    /// Creates a connector with this handshake. Every attempt to connect has a new key.
    pub fn new(inner: C, handshake: ClientHandshake) -> Self {
        Self { inner, handshake }
    }
}

impl<C: Connect> Connect for WebSocketConnector<C> {
    type Socket = C::Socket;

    async fn connect(&self) -> io::Result<Connected<C::Socket>> {
        let mut connected = self.inner.connect().await?.without_early_data()?;
        let (_, already_read) = connect(&mut connected.socket, self.handshake.with_new_key()).await?;
        Ok(Connected { already_read, ..connected })
    }
}
