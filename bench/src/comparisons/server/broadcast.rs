//! A broadcast server without a store: a message of one client is pushed to all others, with a head per connection.

use std::convert::Infallible;
use std::future;

use tidewire_conn::websocket::{self, Message, WebSocket, WebSocketOptions};
use tidewire_conn::{ConnectionContext, Protocol, PushPriority, Reply, Supervisor, Timeouts};
use tokio::net::TcpListener;

use super::super::conn::{raise_file_limit, runtime};
use super::process::ServerProcess;
use crate::role::Role;

pub(super) const ROLE: Role = Role { name: "server-broadcast", run };

/// Starts the server with a file limit for this number of connections. The first connection sends, and all others receive.
pub(super) fn start(connections: usize) -> ServerProcess {
    ServerProcess::new(ROLE.start(&[connections.to_string()]), "listening on ")
}

/// Returns the head for a connection, in the format of the server `tidewire`.
pub(super) fn head(subscriber: u64) -> String {
    format!(r#"{{"subscriptionId":"sub-{subscriber}","#)
}

fn run(arguments: &[String]) {
    let [connections] = arguments else { panic!("expected a number of connections") };
    raise_file_limit(connections.parse().expect("a number of connections"));
    runtime().block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        println!("listening on {}", listener.local_addr().expect("it is bound"));
        // Receiving clients never send a frame.
        let supervisor = Supervisor::builder(Broadcast).timeouts(Timeouts::default().first_frame(None)).build();
        let upgrade = async |mut socket| {
            let already_read = websocket::accept(&mut socket, |_| None).await?;
            Ok((socket, already_read))
        };
        tokio::spawn(async move { supervisor.serve_with(listener, upgrade).await });
        future::pending::<()>().await;
    });
}

struct Broadcast;

impl Protocol for Broadcast {
    type Frame = Message;
    type Codec = WebSocket;
    type ProtocolError = Infallible;

    fn codec(&self) -> WebSocket {
        WebSocket::server(WebSocketOptions::default())
    }

    fn on_frame(&self, message: Message, context: &mut ConnectionContext<Message>) -> Reply<Message, Infallible> {
        let Message::Text(body) = message else { return Reply::None };
        let sender = context.id();
        context.sessions().broadcast(PushPriority::Low, |session| {
            // Sessions are numbered from one, in the order of admission, and the first is the sender.
            let subscriber = session.id().0 - 1;
            (session.id() != sender)
                .then(|| Message::Text(body.clone().with_head(&head(subscriber)).expect("the head is short")))
        });
        Reply::None
    }
}
