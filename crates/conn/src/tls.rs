//! TLS for servers and clients, by rustls.
//!
//! A server [accepts](TlsServer::accept) on the task of the connection, within
//! [`Supervisor::serve_with`](crate::Supervisor::serve_with), so a peer that never finishes its handshake delays no other
//! connection. A client [connects](TlsConnector) by another connector first.

use std::fmt;
use std::io;
use std::sync::{Arc, PoisonError, RwLock};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::rustls::crypto::ring::{default_provider, sign::any_supported_type};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName, pem};
use tokio_rustls::rustls::server::{
    ClientHello, ResolvesServerCert, ResolvesServerCertUsingSni, VerifierBuilderError, WebPkiClientVerifier,
};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, client, server};

use crate::{Connect, Connected};

/// Why there is no TLS.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file is not what it should be.
    #[error("not PEM, or nothing of the kind in it")]
    Pem(#[from] pem::Error),
    /// A chain without certificates.
    #[error("there is no certificate in the chain")]
    NoCertificate,
    /// No authority to trust.
    #[error("there is no authority to trust: name one, or install those of the system")]
    NoAuthority,
    /// A server cannot be called that.
    #[error("not the name of a server: {name:?}")]
    Name {
        /// What it was called.
        name: String,
    },
    /// The authorities for clients cannot be used.
    #[error("clients cannot be verified by these authorities")]
    Verifier(#[from] VerifierBuilderError),
    /// A certificate, its key or the settings do not fit together.
    #[error("the certificates and keys do not fit together")]
    Rustls(#[from] rustls::Error),
}

/// Who one is: a chain of certificates, one's own first, and the key to it.
#[derive(Debug)]
pub struct Identity {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl Identity {
    /// Out of the text of PEM files.
    pub fn from_pem(chain: &[u8], key: &[u8]) -> Result<Self, TlsError> {
        let chain = CertificateDer::pem_slice_iter(chain).collect::<Result<Vec<_>, _>>()?;
        if chain.is_empty() {
            return Err(TlsError::NoCertificate);
        }
        Ok(Self { chain, key: PrivateKeyDer::from_pem_slice(key)? })
    }

    fn certified(self) -> Result<CertifiedKey, TlsError> {
        let certified = CertifiedKey::new(self.chain, any_supported_type(&self.key)?);
        certified.keys_match()?;
        Ok(certified)
    }
}

/// Whom one trusts to vouch for others.
#[derive(Debug)]
pub struct Authorities {
    roots: RootCertStore,
}

impl Authorities {
    /// Those in the text of a PEM file.
    pub fn from_pem(certificates: &[u8]) -> Result<Self, TlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(certificates) {
            roots.add(certificate?)?;
        }
        Self::of(roots)
    }

    /// Those that this system trusts.
    pub fn of_system() -> Result<Self, TlsError> {
        let found = rustls_native_certs::load_native_certs();
        for error in &found.errors {
            tracing::warn!(%error, "a certificate of this system cannot be read");
        }
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(found.certs);
        Self::of(roots)
    }

    fn of(roots: RootCertStore) -> Result<Self, TlsError> {
        if roots.is_empty() { Err(TlsError::NoAuthority) } else { Ok(Self { roots }) }
    }
}

/// Which clients may connect.
#[derive(Debug, Default)]
#[non_exhaustive]
pub enum ClientCertificates {
    /// All; they are not asked who they are.
    #[default]
    NotAsked,
    /// All, and those that show a certificate show one of these authorities.
    Optional(Authorities),
    /// Those that show a certificate of these authorities.
    Required(Authorities),
}

/// How a server speaks TLS, beside who it is.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct TlsServerOptions {
    /// Who it is to clients that ask for one of these names (SNI). Default: the same to all.
    pub by_name: Vec<(String, Identity)>,
    /// Protocols that it speaks, the preferred first (ALPN). Default: none, and clients are not asked.
    pub alpn: Vec<Vec<u8>>,
    /// Which clients may connect. Default: all.
    pub clients: ClientCertificates,
}

/// The server's side of TLS. Clones share its settings, also after they were [replaced](Self::replace).
#[derive(Clone)]
pub struct TlsServer {
    acceptor: Arc<RwLock<TlsAcceptor>>,
}

impl TlsServer {
    /// A server that is this one, unless the options say otherwise.
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
            builder.with_cert_resolver(Arc::new(ByName { by_name, otherwise: Arc::new(identity.certified()?) }));
        config.alpn_protocols = options.alpn;
        Ok(Self::with_config(Arc::new(config)))
    }

    /// A server with settings of one's own.
    pub fn with_config(config: Arc<ServerConfig>) -> Self {
        Self { acceptor: Arc::new(RwLock::new(TlsAcceptor::from(config))) }
    }

    /// Uses the settings of another server for all handshakes that begin from now on, for instance a renewed certificate. Open
    /// connections go on, and sessions of the old settings are not resumed.
    pub fn replace(&self, other: &Self) {
        let acceptor = other.acceptor();
        *self.acceptor.write().unwrap_or_else(PoisonError::into_inner) = acceptor;
    }

    fn acceptor(&self) -> TlsAcceptor {
        self.acceptor.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Shakes hands with a client. It has no time limit of its own.
    pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(&self, socket: S) -> io::Result<server::TlsStream<S>> {
        self.acceptor().accept(socket).await
    }
}

impl fmt::Debug for TlsServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsServer").finish_non_exhaustive()
    }
}

/// Who a server is, by the name that it is asked for.
#[derive(Debug)]
struct ByName {
    by_name: ResolvesServerCertUsingSni,
    otherwise: Arc<CertifiedKey>,
}

impl ResolvesServerCert for ByName {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.by_name.resolve(hello).or_else(|| Some(Arc::clone(&self.otherwise)))
    }
}

/// How a client speaks TLS.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct TlsClientOptions {
    /// Whom it trusts. Default: whom the system trusts.
    pub authorities: Option<Authorities>,
    /// Who it is, to servers that ask. Default: nobody.
    pub identity: Option<Identity>,
    /// Protocols that it speaks, the preferred first (ALPN). Default: none.
    pub alpn: Vec<Vec<u8>>,
}

/// Connects by another connector, and speaks TLS there.
#[derive(Clone)]
pub struct TlsConnector<C> {
    inner: C,
    name: ServerName<'static>,
    connector: tokio_rustls::TlsConnector,
}

impl<C: Connect> TlsConnector<C> {
    /// To a server of that name, which it has to prove.
    pub fn new(inner: C, name: &str, options: TlsClientOptions) -> Result<Self, TlsError> {
        let authorities = options.authorities.map_or_else(Authorities::of_system, Ok)?;
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder.with_safe_default_protocol_versions()?.with_root_certificates(authorities.roots);
        let mut config = match options.identity {
            Some(Identity { chain, key }) => builder.with_client_auth_cert(chain, key)?,
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = options.alpn;
        Self::with_config(inner, name, Arc::new(config))
    }

    /// With settings of one's own.
    pub fn with_config(inner: C, name: &str, config: Arc<ClientConfig>) -> Result<Self, TlsError> {
        let invalid = |_: InvalidDnsNameError| TlsError::Name { name: name.to_owned() };
        let name = ServerName::try_from(name.to_owned()).map_err(invalid)?;
        Ok(Self { inner, name, connector: config.into() })
    }
}

impl<C: Connect> Connect for TlsConnector<C> {
    type Socket = client::TlsStream<C::Socket>;

    async fn connect(&self) -> io::Result<Connected<Self::Socket>> {
        let connected = self.inner.connect().await?.silent()?;
        let socket = self.connector.connect(self.name.clone(), connected.socket).await?;
        Ok(Connected::new(socket, connected.peer))
    }
}

impl<C: fmt::Debug> fmt::Debug for TlsConnector<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsConnector").field("inner", &self.inner).field("name", &self.name).finish_non_exhaustive()
    }
}
