//! A small CA: one key that signs the certificates of the hosts between which VMs migrate.

use crate::error::{day, TlsError};
use crate::files::{certificates, private_key, read, Credentials, CA_FILE, CERT_FILE, KEY_FILE};
use crate::fingerprint::Fingerprint;
use crate::peer::{parse_name, presented};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PublicKeyData,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::CertificateDer;
use std::fs::{self, DirBuilder, File};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use time::{Duration, OffsetDateTime, Time};

/// The CA's key, beside its certificate; it never leaves the folder.
const CA_KEY_FILE: &str = "ca-key.pem";
/// The list of the CA's certificates, beside its key: a day, a fingerprint and names on each line.
const ISSUED_FILE: &str = "issued";
/// Ten years: a new CA requires new certificates on every host at once.
const CA_DAYS: u32 = 3653;

/// A CA in a folder: `ca.pem`, `ca-key.pem`, the list `issued`, and a folder for each host.
#[derive(Debug)]
pub struct Authority {
    dir: PathBuf,
}

/// A host's files.
#[derive(Debug)]
pub struct Issued {
    /// The folder with `ca.pem`, `cert.pem` and `key.pem`.
    pub dir: PathBuf,
    /// The certificate is valid until the beginning of this day, as 2026-11-21.
    pub until: String,
    /// The number by which the certificate can be revoked.
    pub fingerprint: Fingerprint,
}

impl Authority {
    /// The CA in `dir`, which need not exist yet.
    pub fn at(dir: &Path) -> Self {
        Self { dir: dir.into() }
    }

    /// Creates the CA. `force` replaces an existing one and invalidates all its certificates.
    ///
    /// # Errors
    /// A CA exists, or the files cannot be written.
    pub fn init(&self, force: bool) -> Result<(), TlsError> {
        let (cert, key) = (self.dir.join(CA_FILE), self.dir.join(CA_KEY_FILE));
        refuse_existing(&[&cert, &key], force)?;
        let pair = KeyPair::generate().map_err(|error| made(&key, &error))?;
        let mut params = self.params(&pair)?;
        good_between(&mut params, -1, i64::from(CA_DAYS));
        let signed = params.self_signed(&pair).map_err(|error| made(&cert, &error))?;
        private_folder(&self.dir)?;
        write(&key, pair.serialize_pem().as_bytes(), 0o600)?;
        write(&cert, signed.pem().as_bytes(), 0o644)
    }

    /// Signs a certificate for a host with any of `names`; the first is the name of its folder. It
    /// is valid for `days` from now, both as client and as server.
    ///
    /// # Errors
    /// There is no CA, a name cannot be in a certificate, the host has a certificate (without
    /// `force`), or the files cannot be written.
    pub fn issue(&self, names: &[String], days: u32, force: bool) -> Result<Issued, TlsError> {
        self.issue_between(names, -1, i64::from(days), force)
    }

    /// `issue` for a range of days relative to today, for tests.
    pub(crate) fn issue_between(
        &self,
        names: &[String],
        from: i64,
        to: i64,
        force: bool,
    ) -> Result<Issued, TlsError> {
        let first = checked(names)?;
        let ca_path = self.dir.join(CA_FILE);
        let ca = read(&ca_path, "CA", "--dir")?;
        // Before anything is made of it.
        certificates(&ca_path, &ca)?;
        // No accepted name has a slash in it, so it can be the name of a folder.
        let dir = self.dir.join(first);
        let (cert, key) = (dir.join(CERT_FILE), dir.join(KEY_FILE));
        refuse_existing(&[&cert, &key], force)?;
        let pair = KeyPair::generate().map_err(|error| made(&key, &error))?;
        let signed = self.sign_between(names, from, to, &pair)?;
        let fingerprint = self.record(&signed)?;
        private_folder(&dir)?;
        write(&key, pair.serialize_pem().as_bytes(), 0o600)?;
        write(&cert, signed.as_bytes(), 0o644)?;
        write(&dir.join(CA_FILE), &ca, 0o644)?;
        self.check(&dir, &cert, &key, &self.dir.join(CA_KEY_FILE))?;
        Ok(Issued { dir, until: day(midnight(to)), fingerprint })
    }

    /// Adds a certificate (PEM) that [`sign`](Self::sign) has made to the list `issued`. The list
    /// has what revokes it, when the host and its files are out of reach.
    ///
    /// # Errors
    /// The text is no certificate, or the list cannot be written.
    pub fn record(&self, pem: &str) -> Result<Fingerprint, TlsError> {
        let path = self.dir.join(ISSUED_FILE);
        let der = CertificateDer::from_pem_slice(pem.as_bytes())
            .map_err(|error| TlsError::Content { path: path.clone(), detail: error.to_string() })?;
        let fingerprint = Fingerprint::of(&der);
        let names = presented(&der).join(",");
        let line = format!("{} {fingerprint} {names}\n", day(OffsetDateTime::now_utc()));
        let open = File::options().append(true).create(true).mode(0o600).open(&path);
        let append = |mut list: File| {
            let len = list.metadata()?.len();
            let written = list.write_all(line.as_bytes()).and_then(|()| list.sync_all());
            // On a full disk: half a line would hide the next one.
            written.inspect_err(|_| drop(list.set_len(len)))
        };
        open.and_then(append).map_err(TlsError::file("write", &path))?;
        Ok(fingerprint)
    }

    /// The CA's certificate, PEM.
    ///
    /// # Errors
    /// There is no CA, or its certificate cannot be read.
    pub fn certificate(&self) -> Result<String, TlsError> {
        let path = self.dir.join(CA_FILE);
        String::from_utf8(read(&path, "CA", "--dir")?)
            .map_err(|error| TlsError::Content { path, detail: error.to_string() })
    }

    /// Signs a certificate for the owner of a key, with any of `names`, and stores nothing. It is
    /// valid for `days` from now, both as client and as server. Returns it as PEM.
    ///
    /// # Errors
    /// There is no CA, or a name cannot be in a certificate.
    pub fn sign(
        &self,
        names: &[String],
        days: u32,
        key: &impl PublicKeyData,
    ) -> Result<String, TlsError> {
        self.sign_between(names, -1, i64::from(days), key)
    }

    fn sign_between(
        &self,
        names: &[String],
        from: i64,
        to: i64,
        key: &impl PublicKeyData,
    ) -> Result<String, TlsError> {
        let first = checked(names)?;
        let key_path = self.dir.join(CA_KEY_FILE);
        let ca_key = read(&key_path, "CA key", "--dir")?;
        private_key(&key_path, &ca_key)?;
        let unusable = |error: &dyn std::fmt::Display| TlsError::Content {
            path: key_path.clone(),
            detail: error.to_string(),
        };
        let ca_key = String::from_utf8(ca_key).map_err(|error| unusable(&error))?;
        let ca_key = KeyPair::from_pem(&ca_key).map_err(|error| unusable(&error))?;
        let issuer_params = self.params(&ca_key)?;
        let issuer = Issuer::from_params(&issuer_params, &ca_key);
        let cert = self.dir.join(first).join(CERT_FILE);
        let mut params =
            CertificateParams::new(names.to_vec()).map_err(|error| made(&cert, &error))?;
        params.distinguished_name = called(first);
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        good_between(&mut params, from, to);
        let signed = params.signed_by(key, &issuer).map_err(|error| made(&cert, &error))?;
        Ok(signed.pem())
    }

    /// Checks the certificate against `ca.pem`: the key may be another CA's, which otherwise only a
    /// peer would notice.
    fn check(&self, dir: &Path, cert: &Path, key: &Path, ca_key: &Path) -> Result<(), TlsError> {
        let credentials = Credentials::load(&dir.join(CA_FILE), cert, key)?;
        match credentials.check() {
            Err(rustls::Error::InvalidCertificate(
                rustls::CertificateError::UnknownIssuer | rustls::CertificateError::BadSignature,
            )) => {
                for file in [cert, key] {
                    let _ = fs::remove_file(file);
                }
                let detail = format!("it is not the key of {}", self.dir.join(CA_FILE).display());
                Err(TlsError::Content { path: ca_key.into(), detail })
            }
            // Out of date, which tests ask for.
            _ => Ok(()),
        }
    }

    /// The CA's certificate except for its dates: everything else follows from the key, so signing
    /// does not need to parse it.
    fn params(&self, key: &KeyPair) -> Result<CertificateParams, TlsError> {
        let mut params =
            CertificateParams::new(Vec::new()).map_err(|error| made(&self.dir, &error))?;
        let id: String =
            params.key_identifier(key).iter().take(4).map(|byte| format!("{byte:02x}")).collect();
        // Without the id, only a wrong signature would distinguish two CAs of the same name.
        params.distinguished_name = called(&format!("platen CA {id}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        Ok(params)
    }
}

/// The first of some names that can all be in a certificate.
fn checked(names: &[String]) -> Result<&String, TlsError> {
    names.iter().try_for_each(|name| parse_name(name).map(drop))?;
    names.first().ok_or_else(|| TlsError::Name { name: String::new() })
}

fn called(name: &str) -> DistinguishedName {
    let mut called = DistinguishedName::new();
    called.push(DnType::CommonName, name);
    called
}

fn made(path: &Path, error: &rcgen::Error) -> TlsError {
    TlsError::Content { path: path.into(), detail: format!("it cannot be made: {error}") }
}

fn refuse_existing(paths: &[&Path], force: bool) -> Result<(), TlsError> {
    match paths.iter().find(|path| !force && path.exists()) {
        Some(path) => Err(TlsError::Exists { path: path.to_path_buf() }),
        None => Ok(()),
    }
}

/// Creates a folder that only its owner may enter; an existing one remains as it is.
fn private_folder(dir: &Path) -> Result<(), TlsError> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(TlsError::file("make", dir))
}

/// Writes a file atomically, with its mode from the first moment.
fn write(path: &Path, bytes: &[u8], mode: u32) -> Result<(), TlsError> {
    let fresh = path.with_extension("new");
    // Left by a run that was killed.
    let _ = fs::remove_file(&fresh);
    let open = File::options().write(true).create_new(true).mode(mode).open(&fresh);
    open.and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&fresh, path))
        .map_err(TlsError::file("write", path))
}

/// The beginning of a day, counted from today, in UTC.
fn midnight(day: i64) -> OffsetDateTime {
    let today = OffsetDateTime::now_utc().replace_time(Time::MIDNIGHT);
    // The number of days has 32 bits, which is too many for the calendar; its last day stands for
    // ever.
    let last = OffsetDateTime::new_utc(time::Date::MAX, Time::MIDNIGHT);
    today.checked_add(Duration::days(day)).unwrap_or(last)
}

/// Sets the validity of a certificate from one midnight to another, relative to today.
fn good_between(params: &mut CertificateParams, from: i64, to: i64) {
    params.not_before = midnight(from);
    params.not_after = midnight(to);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Acceptor, Connector};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::fs::PermissionsExt;
    use std::time::Instant;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_string()).collect()
    }

    fn load(dir: &Path) -> Result<Credentials, TlsError> {
        Credentials::load(&dir.join(CA_FILE), &dir.join(CERT_FILE), &dir.join(KEY_FILE))
    }

    #[test]
    fn a_truncated_ca_is_named_and_nothing_is_made_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::at(folder.path());
        authority.init(false).unwrap();
        for name in [CA_FILE, CA_KEY_FILE] {
            let path = folder.path().join(name);
            let whole = fs::read(&path).unwrap();
            fs::write(&path, &whole[..whole.len() / 2]).unwrap();
            let said = authority.issue(&["a.example".into()], 9, false).unwrap_err().to_string();
            assert!(said.starts_with(&path.display().to_string()), "{said}");
            assert!(said.contains("it is cut off"), "{said}");
            assert!(!folder.path().join("a.example").exists(), "{said}");
            assert!(!folder.path().join(ISSUED_FILE).exists(), "{said}");
            fs::write(&path, whole).unwrap();
        }
        authority.issue(&["a.example".into()], 9, false).unwrap();
    }

    /// An ECDSA signature is another one each time; its owner can change it, too.
    #[test]
    fn certificates_of_one_key_are_revoked_by_one_number() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::at(folder.path());
        authority.init(false).unwrap();
        let (pair, now) = (KeyPair::generate().unwrap(), OffsetDateTime::now_utc());
        let from = (now - Duration::days(1)).unix_timestamp();
        let to = (now + Duration::days(1)).unix_timestamp();
        let sign = || authority.sign_between(&["a.example".into()], from, to, &pair).unwrap();
        let (one, other) = (sign(), sign());
        assert_ne!(one, other);
        assert_eq!(Fingerprint::of_pem(&one), Fingerprint::of_pem(&other));
    }

    #[test]
    fn each_certificate_is_on_the_list_with_the_number_that_revokes_it() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::at(folder.path());
        authority.init(false).unwrap();
        let first = authority.issue(&names(&["a.example", "10.0.0.1"]), 9, false).unwrap();
        let second = authority.issue(&names(&["a.example"]), 9, true).unwrap();
        let list = fs::read_to_string(folder.path().join("issued")).unwrap();
        let lines: Vec<_> = list.lines().map(|line| line.split_once(' ').unwrap().1).collect();
        let line = |issued: &Issued, names| format!("{} {names}", issued.fingerprint);
        assert_eq!(lines, [line(&first, "a.example,10.0.0.1"), line(&second, "a.example")]);
        assert_eq!(load(&second.dir).unwrap().fingerprint(), Some(second.fingerprint));
        assert!(authority.record("no certificate").is_err());
    }

    #[test]
    fn keys_are_private_and_nothing_is_overwritten_unasked() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::at(&folder.path().join("ca"));
        assert!(authority
            .issue(&names(&["a"]), 9, false)
            .unwrap_err()
            .to_string()
            .contains("--dir"));
        authority.init(false).unwrap();
        let issued = authority.issue(&names(&["a.example", "10.0.0.1"]), 9, false).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&folder.path().join("ca")), 0o700);
        assert_eq!(mode(&folder.path().join("ca/ca-key.pem")), 0o600);
        assert_eq!(mode(&issued.dir.join(KEY_FILE)), 0o600);
        let before = fs::read(issued.dir.join(CERT_FILE)).unwrap();
        let again = authority.issue(&names(&["a.example"]), 9, false).unwrap_err().to_string();
        assert!(again.contains("--force"), "{again}");
        assert!(authority.init(false).unwrap_err().to_string().contains("--force"));
        assert_eq!(fs::read(issued.dir.join(CERT_FILE)).unwrap(), before);
        authority.issue(&names(&["a.example"]), 9, true).unwrap();
        assert_ne!(fs::read(issued.dir.join(CERT_FILE)).unwrap(), before);
        for bad in ["", "a/b", "../x", ".", "a b"] {
            assert!(authority.issue(&names(&[bad]), 9, false).is_err(), "'{bad}'");
        }
        // A half-replaced CA is noticed, and leaves no certificate behind.
        let other = Authority::at(&folder.path().join("other"));
        other.init(false).unwrap();
        fs::copy(folder.path().join("other/ca-key.pem"), folder.path().join("ca/ca-key.pem"))
            .unwrap();
        let wrong = authority.issue(&names(&["b"]), 9, false).unwrap_err().to_string();
        assert!(wrong.contains("not the key of"), "{wrong}");
        assert!(!folder.path().join("ca/b/cert.pem").exists());
    }

    #[test]
    fn a_certificate_of_very_many_days_is_valid_until_the_calendar_ends() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::at(folder.path());
        authority.init(false).unwrap();
        let issued = authority.issue(&names(&["a"]), u32::MAX, false).unwrap();
        assert_eq!(issued.until, "9999-12-31");
        load(&issued.dir).unwrap().check_dates().unwrap();
        let tomorrow = authority.issue(&names(&["b"]), 1, false).unwrap().until;
        assert!(tomorrow > day(OffsetDateTime::now_utc()), "{tomorrow}");
    }

    #[test]
    fn files_that_do_not_fit_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::at(folder.path());
        authority.init(false).unwrap();
        let a = authority.issue(&names(&["a"]), 9, false).unwrap().dir;
        let b = authority.issue(&names(&["b"]), 9, false).unwrap().dir;
        load(&a).unwrap().check_dates().unwrap();
        let said = |ca: &Path, cert: &Path, key: &Path| {
            Credentials::load(ca, cert, key).unwrap_err().to_string()
        };
        let (ca, cert, key) = (a.join(CA_FILE), a.join(CERT_FILE), a.join(KEY_FILE));
        assert!(said(&ca, &cert, &b.join(KEY_FILE)).contains("does not belong"));
        assert!(said(&ca, &a.join("none"), &key).contains("platen cert"));
        assert!(said(&ca, &key, &key).contains("no certificate in PEM"));
        assert!(said(&a, &cert, &key).contains("not a file"));
        fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(said(&ca, &cert, &key).contains("chmod 600"));
    }

    /// The errors of client and server when one of them shows a certificate that is valid from day
    /// `from` to day `to`.
    fn out_of_date(from: i64, to: i64, server_is: bool) -> (String, String) {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::at(folder.path());
        authority.init(false).unwrap();
        let good = load(&authority.issue(&names(&["a"]), 9, false).unwrap().dir).unwrap();
        let bad = authority.issue_between(&names(&["b"]), from, to, false).unwrap();
        let bad = load(&bad.dir).unwrap();
        assert!(bad.check_dates().unwrap_err().to_string().contains("this host's certificate"));
        let (server, client, name) = if server_is { (bad, good, "b") } else { (good, bad, "a") };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (at, _) = listener.accept().unwrap();
        let soon = Instant::now() + std::time::Duration::from_secs(60);
        let acceptor = Acceptor::new(&server, &[]).unwrap();
        let serving = std::thread::spawn(move || {
            acceptor.accept(&at, "client", soon).unwrap_err().to_string()
        });
        let connector = Connector::new(&client, name).unwrap();
        let client = match connector.connect(&to, "server", soon) {
            Err(error) => error.to_string(),
            Ok(mut channel) => loop {
                match channel.reader.read(&to, &mut [0; 9]) {
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    result => break result.unwrap_err().to_string(),
                }
            },
        };
        (client, serving.join().unwrap())
    }

    #[test]
    fn expired_certificates_are_refused_with_the_reason_on_both_sides() {
        let (client, server) = out_of_date(-10, -2, true);
        assert!(client.contains("expired on"), "{client}");
        assert!(server.contains("this end's certificate is out of date"), "{server}");
        let (client, server) = out_of_date(-10, -2, false);
        assert!(server.contains("expired on"), "{server}");
        assert!(client.contains("this end's certificate is out of date"), "{client}");
        let (client, server) = out_of_date(2, 9, false);
        assert!(server.contains("clocks"), "{server}");
        assert!(client.contains("out of date"), "{client}");
    }
}
