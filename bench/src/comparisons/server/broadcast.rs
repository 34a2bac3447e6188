//! A broadcast server on connections alone: a message of one client is pushed to all others, each with its own head.

use std::convert::Infallible;
use std::future;

use tidewire_conn::websocket::{self, Message, WebSocket, WebSocketOptions};
use tidewire_conn::{ConnectionContext, Protocol, PushPriority, Reply, Supervisor, Timeouts};
use tokio::net::TcpListener;

use super::super::conn::{allow_files, runtime};
use super::process::Served;
use crate::role::Role;

pub(super) const ROLE: Role = Role { name: "server-broadcast", play };

/// Starts it for so many connections. The first one speaks, and all that come later listen.
pub(super) fn start(connections: usize) -> Served {
    Served::new(ROLE.start(&[connections.to_string()]), "listening on ")
}

/// What comes before that which all are pushed: the same as the server's.
pub(super) fn head(listener: u64) -> String {
    format!(r#"{{"subscriptionId":"sub-{listener}","#)
}

fn play(arguments: &[String]) {
    let [connections] = arguments else { panic!("the server is told a number") };
    allow_files(connections.parse().expect("a number of connections"));
    runtime().block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        println!("listening on {}", listener.local_addr().expect("it is bound"));
        // Clients that only listen send no frame.
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
        let speaker = context.id();
        context.sessions().broadcast(PushPriority::Low, |session| {
            // They are numbered from one, in the order in which they came, and the first is the speaker.
            let listener = session.id().0 - 1;
            (session.id() != speaker)
                .then(|| Message::Text(body.clone().with_head(&head(listener)).expect("it is short")))
        });
        Reply::None
    }
}
