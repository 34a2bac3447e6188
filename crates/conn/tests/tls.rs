//! TLS over real sockets, with real certificates.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use tempfile::TempDir;
use tidewire_conn::client::{Client, ClientOptions, ClientProtocol, Connect, Incoming, RequestError, TcpConnector};
use tidewire_conn::codec::LengthDelimited;
use tidewire_conn::tls::{
    Authorities, ClientCertificates, Identity, TlsClientOptions, TlsConnector, TlsError, TlsServer, TlsServerOptions,
};
use tidewire_conn::websocket::{self, ClientHandshake, Message, WebSocket, WebSocketConnector, WebSocketOptions};
use tidewire_conn::{ConnectionContext, Frame, Protocol, Reply, Supervisor, Timeouts};
use tidewire_testkit::{Certificates, PATIENCE, wait_until_async};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

struct Echo;

impl Protocol for Echo {
    type Frame = Frame;
    type Codec = LengthDelimited;
    type ProtocolError = Infallible;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }

    fn on_frame(&self, frame: Frame, _: &mut ConnectionContext) -> Reply<Frame, Infallible> {
        Reply::Frame(frame)
    }
}

struct InOrder;

impl ClientProtocol for InOrder {
    type Frame = Frame;
    type Codec = LengthDelimited;

    fn codec(&self) -> LengthDelimited {
        LengthDelimited::default()
    }

    fn classify(&self, _: &Frame) -> Incoming {
        Incoming::NextReply
    }
}

/// Generated certificates, and servers and clients that use them.
struct Fixture {
    certificates: Certificates,
    _folder: TempDir,
}

impl Fixture {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        Self { certificates: Certificates::generate(folder.path()), _folder: folder }
    }

    fn identity(chain: &Path, key: &Path) -> Identity {
        Identity::from_pem(&fs::read(chain).unwrap(), &fs::read(key).unwrap()).unwrap()
    }

    fn authorities(&self) -> Authorities {
        Authorities::from_pem(&fs::read(&self.certificates.authority).unwrap()).unwrap()
    }

    fn client(&self) -> TlsClientOptions {
        TlsClientOptions::default().authorities(self.authorities())
    }

    /// Starts a server with these options. Returns it with its address.
    async fn serve(&self, options: TlsServerOptions) -> (Supervisor<Echo>, String) {
        self.serve_within(options, Duration::from_mins(1)).await
    }

    /// Starts a server with a handshake timeout.
    async fn serve_within(&self, options: TlsServerOptions, limit: Duration) -> (Supervisor<Echo>, String) {
        Self::serve_tls(self.server(options), limit).await
    }

    /// Returns the TLS settings of a server with these options.
    fn server(&self, options: TlsServerOptions) -> TlsServer {
        let Certificates { server, server_key, .. } = &self.certificates;
        TlsServer::new(Self::identity(server, server_key), options).unwrap()
    }

    async fn serve_tls(tls: TlsServer, limit: Duration) -> (Supervisor<Echo>, String) {
        let timeouts = Timeouts::default().first_frame(limit);
        let supervisor = Supervisor::builder(Echo).timeouts(timeouts).build();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let serving = supervisor.clone();
        tokio::spawn(async move {
            let upgrade = |socket| {
                let tls = tls.clone();
                async move { Ok((tls.accept(socket).await?, Vec::new())) }
            };
            serving.serve_with(listener, upgrade).await
        });
        (supervisor, addr)
    }
}

async fn ask<C: Connect>(connector: C) -> Result<Frame, RequestError> {
    let options = ClientOptions::default().reconnect(false).request_timeout(Duration::from_mins(1));
    let (client, _pushes, connection) = Client::builder(InOrder, connector).options(options).build();
    tokio::spawn(connection.run());
    client.request(Frame::from(Bytes::from_static(b"hello"))).await
}

#[tokio::test]
async fn client_rejects_a_wrong_name_and_an_untrusted_authority() {
    let fixture = Fixture::new();
    let (supervisor, addr) = fixture.serve(TlsServerOptions::default()).await;
    let right = TlsConnector::new(TcpConnector::new(addr.clone()), "localhost", fixture.client()).unwrap();
    assert_eq!(ask(right).await.unwrap().body(), "hello");

    let wrong = TlsConnector::new(TcpConnector::new(addr.clone()), "tide.example", fixture.client()).unwrap();
    assert_eq!(ask(wrong).await.unwrap_err(), RequestError::Closed);

    let stranger = Fixture::new();
    let untrusted = TlsConnector::new(TcpConnector::new(addr), "localhost", stranger.client()).unwrap();
    let error = untrusted.connect().await.unwrap_err();
    assert!(error.to_string().contains("certificate"), "{error}");
    wait_until_async("both failed handshakes are counted", PATIENCE, async || {
        supervisor.stats().ended["handshake"] == 2
    })
    .await;
}

#[tokio::test]
async fn sni_selects_the_certificate_and_alpn_the_protocol() {
    let fixture = Fixture::new();
    let Certificates { named, named_key, .. } = &fixture.certificates;
    let options = TlsServerOptions::default()
        .by_name([("tide.example".to_owned(), Fixture::identity(named, named_key))])
        .alpn([b"tide/2".to_vec(), b"tide/1".to_vec()]);
    let (_supervisor, addr) = fixture.serve(options).await;
    for name in ["tide.example", "localhost"] {
        let mut client = fixture.client();
        client.alpn = vec![b"tide/1".to_vec(), b"tide/0".to_vec()];
        let connector = TlsConnector::new(TcpConnector::new(addr.clone()), name, client).unwrap();
        let connected = connector.connect().await.unwrap();
        assert_eq!(connected.socket.get_ref().1.alpn_protocol(), Some(&b"tide/1"[..]));
        assert_eq!(ask(connector).await.unwrap().body(), "hello");
    }
}

#[tokio::test]
async fn server_may_require_a_client_certificate() {
    let fixture = Fixture::new();
    let options = TlsServerOptions::default().clients(ClientCertificates::Required(fixture.authorities()));
    let (supervisor, addr) = fixture.serve(options).await;
    let anonymous = TlsConnector::new(TcpConnector::new(addr.clone()), "localhost", fixture.client()).unwrap();
    // With TLS 1.3 the client gets the error only when it reads.
    assert!(ask(anonymous).await.is_err());
    wait_until_async("the end is counted", PATIENCE, async || supervisor.stats().ended["handshake"] == 1).await;

    let Certificates { client, client_key, .. } = &fixture.certificates;
    let with_certificate = || {
        let mut options = fixture.client();
        options.identity = Some(Fixture::identity(client, client_key));
        options
    };
    let connector = TlsConnector::new(TcpConnector::new(addr), "localhost", with_certificate()).unwrap();
    assert_eq!(ask(connector).await.unwrap().body(), "hello");

    // An optional certificate.
    let options = TlsServerOptions::default().clients(ClientCertificates::Optional(fixture.authorities()));
    let (_supervisor, addr) = fixture.serve(options).await;
    for options in [with_certificate(), fixture.client()] {
        let connector = TlsConnector::new(TcpConnector::new(addr.clone()), "localhost", options).unwrap();
        assert_eq!(ask(connector).await.unwrap().body(), "hello");
    }
}

/// The handshakes fail because of invalid input, no input, and a connection that ends.
#[tokio::test]
async fn failed_handshake_ends_only_its_own_connection() {
    let fixture = Fixture::new();
    // Long enough for a valid handshake on a busy machine.
    let (supervisor, addr) = fixture.serve_within(TlsServerOptions::default(), Duration::from_secs(3)).await;
    let mut invalid = TcpStream::connect(&addr).await.unwrap();
    invalid.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let silent = TcpStream::connect(&addr).await.unwrap();
    let mut cut = TcpStream::connect(&addr).await.unwrap();
    cut.write_all(&[22, 3, 1]).await.unwrap();
    drop(cut);
    wait_until_async("all handshakes have ended", PATIENCE, async || supervisor.stats().ended["handshake"] == 3).await;
    // The server sends an alert and closes the connection.
    let _ = invalid.read_to_end(&mut Vec::new()).await;
    drop(silent);
    let good = TlsConnector::new(TcpConnector::new(addr), "localhost", fixture.client()).unwrap();
    assert_eq!(ask(good).await.unwrap().body(), "hello");
}

#[test]
fn invalid_certificates_keys_and_names_are_rejected() {
    let fixture = Fixture::new();
    let Certificates { server, server_key, client_key, authority, .. } = &fixture.certificates;
    let read = |path: &Path| fs::read(path).unwrap();
    assert!(matches!(Identity::from_pem(b"", &read(server_key)), Err(TlsError::NoCertificate)));
    assert!(matches!(Identity::from_pem(&read(server), b"no key"), Err(TlsError::Pem(_))));
    let mixed = Identity::from_pem(&read(server), &read(client_key)).unwrap();
    assert!(matches!(TlsServer::new(mixed, TlsServerOptions::default()), Err(TlsError::Rustls(_))));
    assert!(matches!(Authorities::from_pem(b"nothing"), Err(TlsError::NoAuthority)));
    let options = TlsClientOptions::default().authorities(Authorities::from_pem(&read(authority)).unwrap());
    let refused = TlsConnector::new(TcpConnector::new("127.0.0.1:1"), "no name", options);
    assert!(matches!(refused, Err(TlsError::Name { name }) if name == "no name"));
}

#[cfg(not(feature = "native-roots"))]
#[test]
fn client_without_native_roots_needs_authorities() {
    let refused = TlsConnector::new(TcpConnector::new("127.0.0.1:1"), "localhost", TlsClientOptions::default());
    assert!(matches!(refused, Err(TlsError::NoAuthority)));
}

struct WebSocketEcho;

impl Protocol for WebSocketEcho {
    type Frame = Message;
    type Codec = WebSocket;
    type ProtocolError = Infallible;

    fn codec(&self) -> WebSocket {
        WebSocket::server(WebSocketOptions::default())
    }

    fn on_frame(&self, message: Message, _: &mut ConnectionContext<Message>) -> Reply<Message, Infallible> {
        Reply::Frame(message)
    }
}

struct WebSocketInOrder;

impl ClientProtocol for WebSocketInOrder {
    type Frame = Message;
    type Codec = WebSocket;

    fn codec(&self) -> WebSocket {
        WebSocket::client(WebSocketOptions::default())
    }

    fn classify(&self, _: &Message) -> Incoming {
        Incoming::NextReply
    }
}

#[tokio::test]
async fn websocket_over_tls() -> io::Result<()> {
    let fixture = Fixture::new();
    let Certificates { server, server_key, .. } = &fixture.certificates;
    let tls = TlsServer::new(Fixture::identity(server, server_key), TlsServerOptions::default()).unwrap();
    let supervisor = Supervisor::builder(WebSocketEcho).build();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?.to_string();
    let upgrade = move |socket| {
        let tls = tls.clone();
        async move {
            let mut socket = tls.accept(socket).await?;
            let already_read = websocket::accept(&mut socket, |_| None).await?;
            Ok((socket, already_read))
        }
    };
    tokio::spawn(async move { supervisor.serve_with(listener, upgrade).await });

    let secure = TlsConnector::new(TcpConnector::new(addr), "localhost", fixture.client()).unwrap();
    let connector = WebSocketConnector::new(secure, ClientHandshake::new("localhost", "/").unwrap());
    let (client, _pushes, connection) = Client::builder(WebSocketInOrder, connector).build();
    tokio::spawn(connection.run());
    let large = Message::binary(vec![7; 500_000]);
    assert_eq!(client.request(large.clone()).await.unwrap(), large);
    assert_eq!(client.request(Message::text("hello")).await.unwrap().as_text(), Some("hello"));
    Ok(())
}

#[tokio::test]
async fn replaced_certificate_applies_to_new_connections() {
    let (old, new) = (Fixture::new(), Fixture::new());
    let tls = old.server(TlsServerOptions::default());
    let (_supervisor, addr) = Fixture::serve_tls(tls.clone(), Duration::from_mins(1)).await;
    let connector =
        |fixture: &Fixture| TlsConnector::new(TcpConnector::new(addr.clone()), "localhost", fixture.client()).unwrap();
    let options = ClientOptions::default().reconnect(false).request_timeout(Duration::from_mins(1));
    let (client, _pushes, connection) = Client::builder(InOrder, connector(&old)).options(options).build();
    tokio::spawn(connection.run());
    let hello = || Frame::from(Bytes::from_static(b"hello"));
    assert_eq!(client.request(hello()).await.unwrap().body(), "hello");

    // The server uses a clone of `tls`, which shares the settings.
    tls.replace(&new.server(TlsServerOptions::default()));
    assert_eq!(ask(connector(&new)).await.unwrap().body(), "hello");
    let error = connector(&old).connect().await.unwrap_err();
    assert!(error.to_string().contains("certificate"), "{error}");
    assert_eq!(client.request(hello()).await.unwrap().body(), "hello", "open connections are not affected");
}
