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
    let number = |pem: &str| {
        Fingerprint::of(&CertificateDer::from_pem_slice(pem.as_bytes()).expect("a certificate"))
    };
    assert_eq!(number(&one), number(&other));
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
    assert!(authority.issue(&names(&["a"]), 9, false).unwrap_err().to_string().contains("--dir"));
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
    fs::copy(folder.path().join("other/ca-key.pem"), folder.path().join("ca/ca-key.pem")).unwrap();
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
    let serving =
        std::thread::spawn(move || acceptor.accept(&at, "client", soon).unwrap_err().to_string());
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
