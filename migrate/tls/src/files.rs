//! The three files of a relay: its CA's certificate, its own certificate, and its key.

use crate::error::{describe, TlsError};
use crate::fingerprint::Fingerprint;
use crate::peer::presented;
use crate::provider::{check, provider};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{CertificateError, RootCertStore};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The default folder of a relay's files.
pub const DEFAULT_DIR: &str = "/etc/platen/tls";
/// The CA's certificate in such a folder.
pub const CA_FILE: &str = "ca.pem";
/// The relay's certificate (and chain) in such a folder.
pub const CERT_FILE: &str = "cert.pem";
/// The relay's key in such a folder.
pub const KEY_FILE: &str = "key.pem";
/// The largest PEM file read.
const MAX_FILE: u64 = 4 << 20;
/// The most characters of a line in a message.
const MAX_LINE: usize = 80;

/// The identity of this end, and the CAs that it trusts.
#[derive(Debug, Clone)]
pub struct Credentials {
    pub(crate) roots: Arc<RootCertStore>,
    pub(crate) key: Arc<CertifiedKey>,
    pub(crate) revoked: Arc<[Fingerprint]>,
    cert_path: PathBuf,
}

impl Credentials {
    /// Reads PEM files: `ca` holds the trusted certificates, `cert` this end's own and any
    /// intermediate ones, `key` its key (PKCS#8, SEC1 or PKCS#1).
    ///
    /// # Errors
    /// A file is missing, cannot be read or has unexpected contents; the key is world-readable or
    /// does not belong to the certificate.
    pub fn load(ca: &Path, cert: &Path, key: &Path) -> Result<Self, TlsError> {
        let authorities = read(ca, "CA certificate", "--tls-ca")?;
        let chain = read(cert, "certificate of this host", "--tls-cert")?;
        let secret = read(key, "key of this host", "--tls-key")?;
        let mode =
            std::fs::metadata(key).map_err(TlsError::file("read", key))?.permissions().mode();
        if mode & 0o007 != 0 {
            let detail =
                format!("everybody may read this key (mode {:o}): chmod 600", mode & 0o777);
            return Err(TlsError::Content { path: key.into(), detail });
        }
        let mut roots = RootCertStore::empty();
        for root in certificates(ca, &authorities)? {
            roots.add(root).map_err(|error| unreadable(ca, &error))?;
        }
        let chain = certificates(cert, &chain)?;
        let secret = private_key(key, &secret)?;
        let provider = provider();
        let key =
            CertifiedKey::from_der(chain, secret, &provider).map_err(|error| match error {
                rustls::Error::InconsistentKeys(_) => TlsError::Content {
                    path: key.into(),
                    detail: format!(
                        "the key does not belong to the certificate {}",
                        cert.display()
                    ),
                },
                rustls::Error::InvalidCertificate(_) => unreadable(cert, &error),
                error => content(key, &error),
            })?;
        let (roots, key, revoked) = (Arc::new(roots), Arc::new(key), Arc::from([]));
        Ok(Self { roots, key, revoked, cert_path: cert.into() })
    }

    /// Returns these credentials, with which no link to the owner of a revoked certificate can be
    /// made.
    ///
    /// # Errors
    /// This end's own certificate is revoked.
    pub fn refusing(self, revoked: Vec<Fingerprint>) -> Result<Self, TlsError> {
        match self.fingerprint().filter(|own| revoked.contains(own)) {
            Some(own) => Err(content(
                &self.cert_path,
                &format!("this host's certificate, {own}, is revoked: the host needs a new one"),
            )),
            None => Ok(Self { revoked: revoked.into(), ..self }),
        }
    }

    /// The fingerprint of this end's own certificate.
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        self.key.cert.first().map(|own| Fingerprint::of(own))
    }

    /// Checks this end's own certificate against its own CA.
    pub(crate) fn check(&self) -> Result<(), rustls::Error> {
        check(&self.key.cert, &self.roots, UnixTime::now())
    }

    /// The names in this end's own certificate.
    pub fn names(&self) -> Vec<String> {
        self.key.cert.first().map_or_else(Vec::new, presented)
    }

    /// When this end's own certificate expires, in seconds since 1970.
    ///
    /// # Errors
    /// The CA has not signed the certificate.
    pub fn valid_until(&self) -> Result<u64, TlsError> {
        let refused = |error: &rustls::Error| {
            let detail = describe(error).replacen("its certificate", "this certificate", 1);
            TlsError::Content { path: self.cert_path.clone(), detail }
        };
        match self.check() {
            // The dates are checked before the signature.
            Err(error) if !is_of_dates(&error) => return Err(refused(&error)),
            _ => {}
        }
        // A check at the end of time names the end of the certificate.
        let never = UnixTime::since_unix_epoch(Duration::from_secs(u64::MAX));
        match check(&self.key.cert, &self.roots, never) {
            Err(rustls::Error::InvalidCertificate(CertificateError::ExpiredContext {
                not_after,
                ..
            })) => Ok(not_after.as_secs()),
            Err(error) => Err(refused(&error)),
            Ok(()) => Ok(u64::MAX),
        }
    }

    /// Refuses a certificate of this end that is out of date, since every peer would refuse it.
    ///
    /// # Errors
    /// The certificate has expired, or is not valid yet.
    pub fn check_dates(&self) -> Result<(), TlsError> {
        match self.check() {
            Err(error) if is_of_dates(&error) => {
                let detail = describe(&error);
                let detail = detail.replacen("its certificate", "this host's certificate", 1);
                Err(TlsError::Content { path: self.cert_path.clone(), detail })
            }
            _ => Ok(()),
        }
    }
}

/// Whether a certificate is refused for its dates.
fn is_of_dates(error: &rustls::Error) -> bool {
    use CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext};
    matches!(
        error,
        rustls::Error::InvalidCertificate(
            Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. }
        )
    )
}

fn content(path: &Path, error: &dyn std::fmt::Display) -> TlsError {
    TlsError::Content { path: path.into(), detail: error.to_string() }
}

/// The error for a certificate that is PEM with other contents. The library would attribute it to
/// the peer.
fn unreadable(path: &Path, error: &rustls::Error) -> TlsError {
    match error {
        rustls::Error::InvalidCertificate(why) => {
            content(path, &format!("it is damaged, or no certificate ({why:?})"))
        }
        error => content(path, error),
    }
}

/// The error for a file that is not PEM. The library would print lines of the file as numbers.
fn not_pem(path: &Path, error: &pem::Error) -> TlsError {
    let text = |line: &[u8]| String::from_utf8_lossy(line).trim_end().escape_debug().to_string();
    match error {
        pem::Error::MissingSectionEnd { end_marker } => {
            let line = format!("-----END {}-----", text(end_marker));
            content(path, &format!("it is cut off: the line {line} is missing"))
        }
        pem::Error::IllegalSectionStart { line } => {
            let line: String = text(line).chars().take(MAX_LINE).collect();
            content(path, &format!("this line begins no section of PEM: {line}"))
        }
        error => content(path, error),
    }
}

/// Reads a file of bounded size.
pub(crate) fn read(
    path: &Path,
    what: &'static str,
    flag: &'static str,
) -> Result<Vec<u8>, TlsError> {
    let found = match std::fs::metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(TlsError::Missing { what, path: path.into(), flag })
        }
        Err(error) => return Err(TlsError::file("read", path)(error)),
    };
    if !found.is_file() || found.len() > MAX_FILE {
        let detail = format!("it is not a file of at most {MAX_FILE} bytes");
        return Err(TlsError::Content { path: path.into(), detail });
    }
    std::fs::read(path).map_err(TlsError::file("read", path))
}

pub(crate) fn private_key(path: &Path, pem: &[u8]) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|error| match error {
        pem::Error::NoItemsFound => content(path, &"it holds no private key in PEM"),
        error => not_pem(path, &error),
    })
}

pub(crate) fn certificates(
    path: &Path,
    pem: &[u8],
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(|error| not_pem(path, &error))?;
    if found.is_empty() {
        return Err(content(path, &"it holds no certificate in PEM"));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_truncated_file_or_no_pem_is_explained() {
        let certificate = &b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"[..];
        let long = [b"-----BEGIN \x1b[2J", &b"x".repeat(9000)[..], b"\n"].concat();
        for (pem, says) in [
            (&certificate[..40], "the line -----END CERTIFICATE----- is missing"),
            (&long, "this line begins no section of PEM: -----BEGIN \\u{1b}[2Jxxx"),
            (b"", "it holds no certificate in PEM"),
        ] {
            let said = certificates(Path::new("cert.pem"), pem).unwrap_err().to_string();
            assert!(said.contains("cert.pem") && said.contains(says), "{said}");
            assert!(said.len() < 300 && !said.contains("67, 69"), "{said}");
        }
        let cut = PrivateKeyDer::from_pem_slice(b"-----BEGIN PRIVATE KEY-----\nMC4").unwrap_err();
        let said = not_pem(Path::new("key.pem"), &cut).to_string();
        assert!(said.contains("the line -----END PRIVATE KEY----- is missing"), "{said}");
    }

    #[test]
    fn damage_is_said_of_the_file_that_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let authority = crate::Authority::at(folder.path());
        authority.init(false).unwrap();
        let issued = authority.issue(&["a.example".into()], 9, false).unwrap().dir;
        let [ca, cert, key] = [CA_FILE, CERT_FILE, KEY_FILE].map(|name| issued.join(name));
        let damaged = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";
        for (path, text, says) in [
            (&ca, damaged, "it is damaged, or no certificate (BadEncoding)"),
            (&cert, damaged, "it is damaged, or no certificate (BadEncoding)"),
            (&key, damaged, "it holds no private key in PEM"),
            (&key, "", "it holds no private key in PEM"),
        ] {
            let whole = std::fs::read(path).unwrap();
            std::fs::write(path, text).unwrap();
            let said = Credentials::load(&ca, &cert, &key).unwrap_err().to_string();
            assert_eq!(said, format!("{} cannot be used: {says}", path.display()));
            std::fs::write(path, whole).unwrap();
        }
        Credentials::load(&ca, &cert, &key).unwrap();
    }

    #[test]
    fn a_certificate_tells_its_names_and_its_end_and_one_of_another_ca_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        for dir in [&one, &other] {
            crate::Authority::at(dir).init(false).unwrap();
        }
        let issued = crate::Authority::at(&one).issue(&["a.example".into()], 9, false).unwrap();
        let (cert, key) = (issued.dir.join(CERT_FILE), issued.dir.join(KEY_FILE));
        let own = Credentials::load(&one.join(CA_FILE), &cert, &key).unwrap();
        assert_eq!(own.names(), ["a.example"]);
        let left = own.valid_until().unwrap() - UnixTime::now().as_secs();
        assert!((8 * 86_400..=9 * 86_400).contains(&left), "{left}");
        let strange = Credentials::load(&other.join(CA_FILE), &cert, &key).unwrap();
        let said = strange.valid_until().unwrap_err().to_string();
        assert!(said.contains("cert.pem"), "{said}");
    }
}
