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
/// Ten years. A new CA requires new certificates on every host at once.
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
    /// The beginning of this day is the end of the certificate's validity, as 2026-11-21.
    pub until: String,
    /// The number by which the certificate can be revoked.
    pub fingerprint: Fingerprint,
}

impl Authority {
    /// Names the CA in `dir`, which need not exist yet.
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
        // This is checked before anything is made of it.
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
    /// holds the data for revoking it when the host and its files are out of reach.
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
            // The disk is full: half a line would hide the next one.
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
            // The certificate is out of date, which tests request.
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

/// The first of some names, all of which can be in a certificate.
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
    // A killed run may have left the file.
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
mod tests;
