//! TLS for servers and clients, with rustls.
//!
//! A server calls [`TlsServer::accept`] in the upgrade closure of [`Supervisor::serve_with`](crate::Supervisor::serve_with). The
//! handshake runs on the task of the connection, so a peer that never finishes it delays no other connection. On the client side,
//! [`TlsConnector`] wraps another connector, and [`TlsClient`] wraps a stream.

use std::fmt;
use std::io;
use std::sync::{Arc, PoisonError, RwLock};

use tokio::io::{AsyncRead, AsyncWrite};
pub use tokio_rustls::client::TlsStream as TlsClientStream;
use tokio_rustls::rustls::crypto::ring::{default_provider, sign::any_supported_type};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName, pem};
use tokio_rustls::rustls::server::{
    ClientHello, ResolvesServerCert, ResolvesServerCertUsingSni, VerifierBuilderError, WebPkiClientVerifier,
};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{self, AlertDescription, CertificateError, ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, server};

use crate::client::{Connect, Connected};

/// An error in the TLS configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A PEM file is invalid, or does not contain the expected certificates or key.
    #[error("invalid PEM, or no certificate or private key in it")]
    Pem(#[from] pem::Error),
    /// The certificate chain is empty.
    #[error("the certificate chain contains no certificate")]
    NoCertificate,
    /// There is no trusted certificate authority.
    #[error(
        "no trusted certificate authority; set `authorities`, or enable the feature `native-roots` and install system certificates"
    )]
    NoAuthority,
    /// The server name is neither a DNS name nor an IP address.
    #[error("invalid server name {name:?}; expected a DNS name or an IP address")]
    Name {
        /// The invalid name.
        name: String,
    },
    /// The certificate authorities for clients cannot be used.
    #[error("the certificate authorities for clients cannot be used")]
    Verifier(#[from] VerifierBuilderError),
    /// A certificate, its private key or the settings are invalid or do not match.
    #[error("invalid certificate, private key or TLS settings")]
    Rustls(#[from] rustls::Error),
}

/// Why the handshake of a [`TlsClient`] failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsHandshakeError {
    /// The certificate of the server was not signed by a trusted authority.
    #[error("the certificate of the server was not signed by a trusted authority; add its authority to `authorities`")]
    UnknownAuthority,
    /// The certificate of the server is for other names.
    #[error("{0}; connect by a name of the certificate, or set the server name")]
    WrongName(CertificateError),
    /// The certificate of the server has expired, or is not valid yet.
    #[error("{0}; renew the certificate of the server, or correct the clock")]
    NotValidNow(CertificateError),
    /// The certificate of the server is invalid for another reason.
    #[error("invalid certificate of the server: {0}")]
    InvalidCertificate(CertificateError),
    /// The server requires a certificate of the client.
    #[error("the server requires a client certificate; set `identity`")]
    IdentityRequired,
    /// The server rejected the certificate of the client.
    #[error("the server rejected the client certificate with the alert {0:?}; set an `identity` that it trusts")]
    IdentityRejected(AlertDescription),
    /// The server sent something that is not TLS.
    #[error("the server does not speak TLS on this port; connect without TLS, or to its port for TLS")]
    NotTls(#[source] rustls::Error),
    /// The connection failed, or the server uses TLS in a way that is not supported.
    #[error("{0}")]
    Io(#[source] io::Error),
}

/// Classifies an error of the stream. With TLS 1.3 a server may reject a client certificate after the handshake, so the first read
/// may have the reason.
impl From<io::Error> for TlsHandshakeError {
    fn from(error: io::Error) -> Self {
        use AlertDescription as Alert;
        use CertificateError as Invalid;
        use rustls::Error as Rustls;
        match error.get_ref().and_then(|source| source.downcast_ref::<Rustls>()) {
            Some(Rustls::InvalidCertificate(certificate)) => match certificate.clone() {
                // The signature is bad if another authority has the same name.
                Invalid::UnknownIssuer | Invalid::BadSignature => Self::UnknownAuthority,
                name @ (Invalid::NotValidForName | Invalid::NotValidForNameContext { .. }) => Self::WrongName(name),
                time @ (Invalid::Expired
                | Invalid::ExpiredContext { .. }
                | Invalid::NotValidYet
                | Invalid::NotValidYetContext { .. }) => Self::NotValidNow(time),
                other => Self::InvalidCertificate(other),
            },
            Some(Rustls::AlertReceived(Alert::CertificateRequired)) => Self::IdentityRequired,
            Some(Rustls::AlertReceived(
                alert @ (Alert::BadCertificate
                | Alert::UnsupportedCertificate
                | Alert::CertificateRevoked
                | Alert::CertificateExpired
                | Alert::CertificateUnknown
                | Alert::UnknownCA
                // The signature of the certificate is bad, for the same reason.
                | Alert::DecryptError
                | Alert::AccessDenied),
            )) => Self::IdentityRejected(*alert),
            Some(message @ Rustls::InvalidMessage(_)) => Self::NotTls(message.clone()),
            _ => Self::Io(error),
        }
    }
}

/// A certificate chain, beginning with the end-entity certificate, and its private key.
#[derive(Debug)]
pub struct Identity {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl Identity {
    /// Reads an identity from the contents of PEM files.
    pub fn from_pem(chain: &[u8], key: &[u8]) -> Result<Self, TlsError> {
        let chain = CertificateDer::pem_slice_iter(chain).collect::<Result<Vec<_>, _>>()?;
        if chain.is_empty() {
            return Err(TlsError::NoCertificate);
        }
        Ok(Self { chain, key: PrivateKeyDer::from_pem_slice(key)? })
    }

    /// Returns the identity in the form that rustls uses, after a check that the key matches the certificate.
    fn certified(self) -> Result<CertifiedKey, TlsError> {
        let certified = CertifiedKey::new(self.chain, any_supported_type(&self.key)?);
        certified.keys_match()?;
        Ok(certified)
    }
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        Self { chain: self.chain.clone(), key: self.key.clone_key() }
    }
}

/// Trusted certificate authorities.
#[derive(Debug, Clone)]
pub struct Authorities {
    roots: RootCertStore,
}

impl Authorities {
    /// Reads authorities from the contents of a PEM file.
    pub fn from_pem(certificates: &[u8]) -> Result<Self, TlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(certificates) {
            roots.add(certificate?)?;
        }
        Self::from_roots(roots)
    }

    /// Loads the authorities that the operating system trusts. Needs the feature `native-roots`.
    #[cfg(feature = "native-roots")]
    pub fn from_system() -> Result<Self, TlsError> {
        let found = rustls_native_certs::load_native_certs();
        for error in &found.errors {
            tracing::warn!(%error, "system certificate cannot be read");
        }
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(found.certs);
        Self::from_roots(roots)
    }

    fn from_roots(roots: RootCertStore) -> Result<Self, TlsError> {
        if roots.is_empty() { Err(TlsError::NoAuthority) } else { Ok(Self { roots }) }
    }
}

/// Whether clients authenticate with a certificate.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub enum ClientCertificates {
    /// Clients are not asked for a certificate.
    #[default]
    NotAsked,
    /// Clients may send a certificate, which one of these authorities must have signed.
    Optional(Authorities),
    /// Clients must send a certificate that one of these authorities has signed.
    Required(Authorities),
}

/// Options of a [`TlsServer`].
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct TlsServerOptions {
    /// Identities for clients that ask for one of these names (SNI). Default: none, because most servers have one name.
    pub by_name: Vec<(String, Identity)>,
    /// Application protocols, the preferred one first (ALPN). Default: none, and nothing is negotiated.
    pub alpn: Vec<Vec<u8>>,
    /// Whether clients need a certificate. Default: [`NotAsked`](ClientCertificates::NotAsked), because most clients have none.
    pub clients: ClientCertificates,
}

impl TlsServerOptions {
    /// Sets [`by_name`](#structfield.by_name).
    #[must_use]
    pub fn by_name(mut self, by_name: impl Into<Vec<(String, Identity)>>) -> Self {
        self.by_name = by_name.into();
        self
    }

    /// Sets [`alpn`](#structfield.alpn).
    #[must_use]
    pub fn alpn(mut self, alpn: impl Into<Vec<Vec<u8>>>) -> Self {
        self.alpn = alpn.into();
        self
    }

    /// Sets [`clients`](#structfield.clients).
    #[must_use]
    pub fn clients(mut self, clients: ClientCertificates) -> Self {
        self.clients = clients;
        self
    }
}

/// The server side of TLS. Clones share their settings: [`replace`](Self::replace) on one of them applies to all.
#[derive(Clone)]
pub struct TlsServer {
    acceptor: Arc<RwLock<TlsAcceptor>>,
}

impl TlsServer {
    /// Creates a server with this identity, which is used unless the client asks for one of the names in the options.
    pub fn new(identity: Identity, options: TlsServerOptions) -> Result<Self, TlsError> {
        let provider = Arc::new(default_provider());
        let builder =
            ServerConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions()?;
        let verifier = |authorities: Authorities| {
            WebPkiClientVerifier::builder_with_provider(Arc::new(authorities.roots), Arc::clone(&provider))
        };
        let builder = match options.clients {
            ClientCertificates::NotAsked => builder.with_no_client_auth(),
            ClientCertificates::Optional(authorities) => {
                builder.with_client_cert_verifier(verifier(authorities).allow_unauthenticated().build()?)
            }
            ClientCertificates::Required(authorities) => {
                builder.with_client_cert_verifier(verifier(authorities).build()?)
            }
        };
        let mut by_name = ResolvesServerCertUsingSni::new();
        for (name, identity) in options.by_name {
            by_name.add(&name, identity.certified()?)?;
        }
        let mut config =
            builder.with_cert_resolver(Arc::new(ResolveByName { by_name, default: Arc::new(identity.certified()?) }));
        config.alpn_protocols = options.alpn;
        Ok(Self::with_config(Arc::new(config)))
    }

    /// Creates a server with custom settings.
    pub fn with_config(config: Arc<ServerConfig>) -> Self {
        Self { acceptor: Arc::new(RwLock::new(TlsAcceptor::from(config))) }
    }

    /// Replaces the settings with those of another server for all handshakes from now on, for example with a renewed certificate. Open
    /// connections are not affected. TLS sessions of the old settings are not resumed.
    pub fn replace(&self, other: &Self) {
        let acceptor = other.acceptor();
        *self.acceptor.write().unwrap_or_else(PoisonError::into_inner) = acceptor;
    }

    fn acceptor(&self) -> TlsAcceptor {
        self.acceptor.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Performs the handshake with a client. There is no timeout except that of the caller.
    pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(&self, socket: S) -> io::Result<server::TlsStream<S>> {
        self.acceptor().accept(socket).await
    }
}

impl fmt::Debug for TlsServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsServer").finish_non_exhaustive()
    }
}

/// Selects the certificate by the server name in the client hello, with a default.
#[derive(Debug)]
struct ResolveByName {
    by_name: ResolvesServerCertUsingSni,
    default: Arc<CertifiedKey>,
}

impl ResolvesServerCert for ResolveByName {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.by_name.resolve(hello).or_else(|| Some(Arc::clone(&self.default)))
    }
}

/// Options of a [`TlsClient`].
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct TlsClientOptions {
    /// The trusted certificate authorities. Default: those of the operating system, with the feature `native-roots`; without it
    /// they must be set.
    pub authorities: Option<Authorities>,
    /// The certificate for servers that ask for one. Default: none, because most servers do not ask.
    pub identity: Option<Identity>,
    /// Application protocols, the preferred one first (ALPN). Default: none, and nothing is negotiated.
    pub alpn: Vec<Vec<u8>>,
}

impl TlsClientOptions {
    /// Sets [`authorities`](#structfield.authorities).
    #[must_use]
    pub fn authorities(mut self, authorities: Authorities) -> Self {
        self.authorities = Some(authorities);
        self
    }

    /// Sets [`identity`](#structfield.identity).
    #[must_use]
    pub fn identity(mut self, identity: Identity) -> Self {
        self.identity = Some(identity);
        self
    }

    /// Sets [`alpn`](#structfield.alpn).
    #[must_use]
    pub fn alpn(mut self, alpn: impl Into<Vec<Vec<u8>>>) -> Self {
        self.alpn = alpn.into();
        self
    }
}

/// The client side of TLS, for one server. Clones share its settings and the TLS sessions that can be resumed.
#[derive(Clone)]
pub struct TlsClient {
    name: ServerName<'static>,
    connector: tokio_rustls::TlsConnector,
}

impl TlsClient {
    /// Creates a client for a server whose certificate must be valid for this name.
    pub fn new(name: &str, options: TlsClientOptions) -> Result<Self, TlsError> {
        #[cfg(feature = "native-roots")]
        let authorities = options.authorities.map_or_else(Authorities::from_system, Ok)?;
        #[cfg(not(feature = "native-roots"))]
        let authorities = options.authorities.ok_or(TlsError::NoAuthority)?;
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder.with_safe_default_protocol_versions()?.with_root_certificates(authorities.roots);
        let mut config = match options.identity {
            Some(Identity { chain, key }) => builder.with_client_auth_cert(chain, key)?,
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = options.alpn;
        Self::with_config(name, Arc::new(config))
    }

    /// Creates a client with custom settings.
    pub fn with_config(name: &str, config: Arc<ClientConfig>) -> Result<Self, TlsError> {
        let invalid = |_: InvalidDnsNameError| TlsError::Name { name: name.to_owned() };
        let name = ServerName::try_from(name.to_owned()).map_err(invalid)?;
        Ok(Self { name, connector: config.into() })
    }

    /// Performs the handshake over a stream. It has no timeout of its own.
    pub async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
    ) -> Result<TlsClientStream<S>, TlsHandshakeError> {
        Ok(self.handshake(stream).await?)
    }

    async fn handshake<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> io::Result<TlsClientStream<S>> {
        self.connector.connect(self.name.clone(), stream).await
    }
}

impl fmt::Debug for TlsClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsClient").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A connector that adds TLS to the connections of another connector.
#[derive(Debug, Clone)]
pub struct TlsConnector<C> {
    inner: C,
    client: TlsClient,
}

impl<C: Connect> TlsConnector<C> {
    /// Creates a connector to a server whose certificate must be valid for this name.
    pub fn new(inner: C, name: &str, options: TlsClientOptions) -> Result<Self, TlsError> {
        Ok(Self { inner, client: TlsClient::new(name, options)? })
    }

    /// Creates a connector with custom settings.
    pub fn with_config(inner: C, name: &str, config: Arc<ClientConfig>) -> Result<Self, TlsError> {
        Ok(Self { inner, client: TlsClient::with_config(name, config)? })
    }
}

impl<C: Connect> Connect for TlsConnector<C> {
    type Socket = TlsClientStream<C::Socket>;

    async fn connect(&self) -> io::Result<Connected<Self::Socket>> {
        let connected = self.inner.connect().await?.without_early_data()?;
        let socket = self.client.handshake(connected.socket).await?;
        Ok(Connected::new(socket, connected.peer))
    }
}
