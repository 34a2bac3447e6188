//! Certificates for TLS tests.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, date_time_ymd,
};

/// PEM files: a certificate authority, and certificates of a server and a client that it has signed.
#[derive(Debug, Clone)]
pub struct Certificates {
    /// The certificate of the authority, trusted by both sides.
    pub authority: PathBuf,
    /// The server's certificate, for `localhost` and `127.0.0.1`.
    pub server: PathBuf,
    /// The server's private key.
    pub server_key: PathBuf,
    /// A certificate of the same server for `tide.example`.
    pub named: PathBuf,
    /// The private key of `named`.
    pub named_key: PathBuf,
    /// A certificate of the server that has expired.
    pub expired: PathBuf,
    /// The private key of `expired`.
    pub expired_key: PathBuf,
    /// A client's certificate.
    pub client: PathBuf,
    /// The client's private key.
    pub client_key: PathBuf,
}

impl Certificates {
    /// Generates certificates in `dir`.
    ///
    /// # Panics
    ///
    /// If they cannot be generated or written.
    pub fn generate(dir: &Path) -> Self {
        Self::try_generate(dir).unwrap_or_else(|error| panic!("no test certificates in {}: {error}", dir.display()))
    }

    fn try_generate(dir: &Path) -> Result<Self, Box<dyn std::error::Error>> {
        let mut params = certificate_params("Tidewire test authority", vec![])?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;

        let write = |name: &str, pem: String| {
            let path = dir.join(name);
            fs::write(&path, pem).map(|()| path)
        };
        let issue = |name: &str, params: &CertificateParams| {
            let key = KeyPair::generate()?;
            let certificate = params.signed_by(&key, &authority)?;
            Ok::<_, Box<dyn std::error::Error>>((
                write(&format!("{name}.pem"), certificate.pem())?,
                write(&format!("{name}.key"), key.serialize_pem())?,
            ))
        };

        let mut params = certificate_params("Tidewire test server", vec!["localhost".into(), "127.0.0.1".into()])?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let (server, server_key) = issue("server", &params)?;

        let mut params = certificate_params("Tidewire test server", vec!["tide.example".into()])?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let (named, named_key) = issue("named", &params)?;

        let mut params = certificate_params("Tidewire test server", vec!["localhost".into(), "127.0.0.1".into()])?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(2001, 1, 1);
        let (expired, expired_key) = issue("expired", &params)?;

        let mut params = certificate_params("Tidewire test client", vec![])?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let (client, client_key) = issue("client", &params)?;

        let authority = write("authority.pem", authority.pem())?;
        Ok(Self { authority, server, server_key, named, named_key, expired, expired_key, client, client_key })
    }
}

fn certificate_params(name: &str, hosts: Vec<String>) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(hosts)?;
    params.distinguished_name.push(DnType::CommonName, name);
    Ok(params)
}
