//! TLS, by rustls. Needs the feature `tls`.
//!
//! ```no_run
//! use tidewire_redis::tls::{Authorities, Identity, TlsOptions};
//! use tidewire_redis::{Client, Options};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let authorities = Authorities::from_pem(&std::fs::read("authority.pem")?)?;
//! let identity = Identity::from_pem(&std::fs::read("client.pem")?, &std::fs::read("client.key")?)?;
//! let tls = TlsOptions::default().authorities(authorities).identity(identity);
//! let client = Client::start(Options::from_url("rediss://redis.example:6380")?.tls(tls));
//! # Ok(())
//! # }
//! ```

use std::io;
use std::sync::Arc;

pub use tidewire_conn::tls::{Authorities, Identity, TlsError, TlsHandshakeError};
use tidewire_conn::tls::{TlsClient, TlsClientOptions};
use tokio::sync::OnceCell;

use crate::{Address, ConnectionError, Options};

/// Options of TLS.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct TlsOptions {
    /// The trusted certificate authorities. Default: those of the operating system, with the feature `native-roots`; without it
    /// they must be set.
    pub authorities: Option<Authorities>,
    /// The certificate for servers that ask for one. Default: none, because a password is more common.
    pub identity: Option<Identity>,
    /// The name that the certificate of the server must be valid for. Default: none, which means the host of the address.
    pub server_name: Option<String>,
}

impl TlsOptions {
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

    /// Sets [`server_name`](#structfield.server_name).
    #[must_use]
    pub fn server_name(mut self, server_name: impl Into<String>) -> Self {
        self.server_name = Some(server_name.into());
        self
    }
}

/// The TLS settings that the connections of one client share. Made by the first attempt to connect, because the authorities of the
/// system are read from files. TLS sessions are resumed by later attempts.
#[derive(Debug, Clone, Default)]
pub(crate) struct SharedTls(Arc<OnceCell<TlsClient>>);

impl SharedTls {
    /// Returns the settings for these options, which are the same at every call.
    pub(crate) async fn client(&self, options: &Options, tls: &TlsOptions) -> Result<TlsClient, ConnectionError> {
        let make = || async {
            let name = tls.server_name.clone().unwrap_or_else(|| host(&options.address));
            let mut client_options = TlsClientOptions::default();
            client_options.authorities.clone_from(&tls.authorities);
            client_options.identity.clone_from(&tls.identity);
            let made = tokio::task::spawn_blocking(move || TlsClient::new(&name, client_options)).await;
            made.map_err(io::Error::from)?.map_err(|error| ConnectionError::TlsOptions(Arc::new(error)))
        };
        self.0.get_or_try_init(make).await.cloned()
    }
}

/// Returns the host of an address as it is in certificates: without the interface of a link-local address.
fn host(address: &Address) -> String {
    match address {
        Address::Tcp { host, .. } => host.split_once('%').map_or(&**host, |(host, _)| host).to_owned(),
        Address::Unix(path) => path.display().to_string(),
    }
}
