//! The handshakes of servers and clients over a stream.

use std::io;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::{ClientHandshake, ServerHandshake, ServerHandshakeError, UpgradeRequest, Upgraded};

/// Reads a request to upgrade to a WebSocket and accepts it, for servers without an HTTP library. Any other request is refused with
/// an HTTP response. `choose` returns one of the offered subprotocols, or `None`.
///
/// Returns the bytes that were read after the request, for [`Permit::run`](crate::Permit::run). The function has no timeout, but
/// [`Supervisor::serve_with`](crate::Supervisor::serve_with) has one. Servers that use an HTTP library call
/// [`check_upgrade`](crate::websocket::check_upgrade) instead.
pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
    socket: &mut S,
    choose: impl FnOnce(&UpgradeRequest) -> Option<String>,
) -> io::Result<Vec<u8>> {
    let mut handshake = ServerHandshake::new();
    let mut input = BytesMut::new();
    let response = loop {
        match handshake.decode(&mut input) {
            Ok(Some(request)) => break request.accept(choose(&request).as_deref()),
            Ok(None) => read(socket, &mut input).await?,
            Err(refused) => break Err(refused),
        }
    };
    let refused = |error: ServerHandshakeError| io::Error::new(io::ErrorKind::InvalidData, error);
    match response {
        Ok(response) => {
            socket.write_all(&response).await?;
            socket.flush().await?;
            Ok(input.to_vec())
        }
        Err(error) => {
            socket.write_all(&error.refusal()).await?;
            socket.shutdown().await?;
            Err(refused(error))
        }
    }
}

/// Performs the handshake of a client. Returns its result, and the bytes that were read after the response.
pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
    socket: &mut S,
    mut handshake: ClientHandshake,
) -> io::Result<(Upgraded, Vec<u8>)> {
    socket.write_all(&handshake.request()).await?;
    socket.flush().await?;
    let mut input = BytesMut::new();
    loop {
        let upgraded = handshake.decode(&mut input);
        match upgraded.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))? {
            Some(upgraded) => return Ok((upgraded, input.to_vec())),
            None => read(socket, &mut input).await?,
        }
    }
}

async fn read<S: AsyncRead + Unpin>(socket: &mut S, input: &mut BytesMut) -> io::Result<()> {
    match socket.read_buf(input).await? {
        0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "connection closed during the WebSocket handshake")),
        _ => Ok(()),
    }
}
