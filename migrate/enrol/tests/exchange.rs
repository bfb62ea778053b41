//! An offer and those who come to it.

use enrol::{EnrolError, Joined, Offer, Token, AT_A_TIME};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tls::{Authority, Credentials};

/// An address of this program: a port that an offer leaves gets no other test.
const ANY: &str = "127.80.76.7:0";
/// An offer that ends by itself is not waited for as long.
const LONG: Duration = Duration::from_secs(1200);

fn any() -> TcpListener {
    TcpListener::bind(ANY).unwrap()
}

/// A new host that writes its files, of which there are none here.
fn join(address: &str, token: &Token) -> Result<Joined, EnrolError> {
    let (joined, reply) = enrol::join(address, token)?;
    reply.written()?;
    Ok(joined)
}

fn authority(dir: &Path) -> Authority {
    let authority = Authority::at(dir);
    authority.init(false).unwrap();
    authority
}

fn offer(dir: &Path) -> (Offer, String, Token) {
    offer_for(dir, LONG)
}

fn offer_for(dir: &Path, valid: Duration) -> (Offer, String, Token) {
    let names = vec!["hostb".to_owned(), "10.0.0.2".to_owned()];
    let configuration = Some("# the configuration\n".to_owned());
    let offer = Offer::new(authority(dir), names, 9, configuration, any(), valid).unwrap();
    let (address, token) = (offer.address().unwrap().to_string(), offer.token().clone());
    (offer, address, token)
}

/// Runs `guest` while the offer waits.
fn while_offered<T>(offer: &Offer, guest: impl FnOnce() -> T) -> (Result<(), EnrolError>, T) {
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| offer.wait(|_| {}));
        let got = guest();
        (waiting.join().unwrap(), got)
    })
}

#[test]
fn a_host_gets_a_certificate_for_a_key_that_stays_with_it_and_the_token_is_used_up() {
    let folder = tempfile::tempdir().unwrap();
    let (offer, address, token) = offer(folder.path());
    // Written down and read again.
    let token: Token = token.to_string().parse().unwrap();
    let (done, joined) = while_offered(&offer, || join(&address, &token).unwrap());
    done.unwrap();
    assert_eq!(joined.names, ["hostb", "10.0.0.2"]);
    assert_eq!(joined.configuration.as_deref(), Some("# the configuration\n"));
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&path, mode).unwrap();
        path
    };
    let own = Credentials::load(
        &file("got-ca.pem", &joined.authority),
        &file("got-cert.pem", &joined.certificate),
        &file("got-key.pem", &joined.key),
    )
    .unwrap();
    assert_eq!(own.names(), ["hostb", "10.0.0.2"]);
    own.valid_until().unwrap();
    // The key of the CA is where it was, the one of the host nowhere else.
    let files = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(files, 2 + 1 + 3, "nothing of the host but a line of the list is stored at the CA");
    let list = std::fs::read_to_string(folder.path().join("issued")).unwrap();
    let number = own.fingerprint().unwrap();
    assert!(list.ends_with(&format!(" {number} hostb,10.0.0.2\n")), "{list}");
    assert_eq!(offer.issued(), Some(number));
    // The offer is over, though its socket is still there: nobody accepts.
    offer.wait(|_| {}).unwrap();
}

#[test]
fn two_that_come_with_one_token_get_one_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let (offer, address, token) = offer(folder.path());
    let (done, joined) = while_offered(&offer, || {
        std::thread::scope(|scope| {
            let both = [0, 1].map(|_| scope.spawn(|| join(&address, &token)));
            both.map(|one| one.join().unwrap())
        })
    });
    done.unwrap();
    assert_eq!(joined.iter().filter(|joined| joined.is_ok()).count(), 1, "{joined:?}");
}

#[test]
fn a_host_that_is_not_that_of_the_ca_learns_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (_mine, _, token) = offer(&folder.path().join("mine"));
    let (other, address, _) = offer(&folder.path().join("other"));
    let refused = AtomicBool::new(false);
    let said = std::thread::scope(|scope| {
        let joining = scope.spawn(|| {
            let joined = join(&address, &token);
            refused.store(true, Ordering::Relaxed);
            joined.unwrap_err().to_string()
        });
        assert!(!other.wait_while(|| !refused.load(Ordering::Relaxed), |_| {}).unwrap());
        joining.join().unwrap()
    });
    assert!(said.contains("is not the host of this token's CA"), "{said}");
    assert_eq!(other.issued(), None);
    // Nor does one that speaks no TLS: it gets a ClientHello, in which the secret is not.
    let listener = TcpListener::bind(ANY).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let heard = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut bytes = vec![0; 4096];
        let got = socket.read(&mut bytes).unwrap();
        socket.write_all(b"HTTP/1.0 400\r\n\r\n").unwrap();
        bytes.truncate(got);
        bytes
    });
    join(&address, &token).unwrap_err();
    let secret = token.to_string()[..32].to_owned();
    assert!(!String::from_utf8_lossy(&heard.join().unwrap()).contains(&secret));
}

/// The right hash, and a secret of zeros.
fn with_a_wrong_secret(token: &Token) -> Token {
    format!("{}{}", "0".repeat(32), &token.to_string()[32..]).parse().unwrap()
}

const WRONG: &str = "the secret of the token is wrong";

/// The offer's refusal of a wrong secret. A connection has 10 s, in which a thread of either end
/// may get no CPU: then the host comes again.
fn refused(address: &str, wrong: &Token, until: Instant) -> String {
    loop {
        let said = join(address, wrong).unwrap_err().to_string();
        if said.contains(WRONG) || Instant::now() > until {
            return said;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Anybody who reaches the port can send these.
#[test]
fn neither_wrong_secrets_nor_noise_end_an_offer() {
    let folder = tempfile::tempdir().unwrap();
    let (offer, address, token) = offer(folder.path());
    let (wrong, until) = (with_a_wrong_secret(&token), Instant::now() + LONG);
    let (done, (all, joined)) = while_offered(&offer, || {
        for noise in [&b""[..], b"GET / HTTP/1.0\r\n\r\n", &[0x16; 70_000]] {
            let _ = TcpStream::connect(&address).unwrap().write_all(noise);
        }
        let all: Vec<_> = std::thread::scope(|scope| {
            let all: Vec<_> =
                (0..10).map(|_| scope.spawn(|| refused(&address, &wrong, until))).collect();
            let all = all.into_iter().map(|one| one.join().unwrap());
            all.chain((0..11).map(|_| refused(&address, &wrong, until))).collect()
        });
        (all, join(&address, &token))
    });
    for said in all {
        assert!(said.contains(WRONG), "{said}");
    }
    done.unwrap();
    assert_eq!(joined.unwrap().names, ["hostb", "10.0.0.2"]);
}

#[test]
fn connections_that_say_nothing_shut_no_host_out() {
    let folder = tempfile::tempdir().unwrap();
    let (offer, address, token) = offer(folder.path());
    let (done, idle) = while_offered(&offer, || {
        let connect = || TcpStream::connect(&address).unwrap();
        let idle: Vec<_> = (0..2 * AT_A_TIME).map(|_| connect()).collect();
        join(&address, &token).unwrap();
        idle
    });
    done.unwrap();
    drop(idle);
}

/// As `platen host add --ssh` waits, whose ssh has ended.
#[test]
fn whoever_says_nothing_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let (offer, address, token) = offer(folder.path());
    let mut idle = TcpStream::connect(&address).unwrap();
    let served = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Connections are taken in their order: with the answer to this one, the idle one is
            // being served.
            refused(&address, &with_a_wrong_secret(&token), Instant::now() + LONG);
            served.store(true, Ordering::Relaxed);
        });
        assert!(!offer.wait_while(|| !served.load(Ordering::Relaxed), |_| {}).unwrap());
    });
    // Closed, though its time was not over.
    idle.set_read_timeout(Some(LONG)).unwrap();
    assert_eq!(idle.read_to_end(&mut Vec::new()).unwrap(), 0);
}

#[test]
fn a_host_has_joined_when_it_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let end = |name: &str, then: fn(enrol::Reply)| {
        let (offer, address, token) = offer(&folder.path().join(name));
        let (done, ()) = while_offered(&offer, || then(enrol::join(&address, &token).unwrap().1));
        let issued = offer.issued().map(|number| number.to_string()).unwrap();
        let list = std::fs::read_to_string(folder.path().join(name).join("issued")).unwrap();
        assert!(list.contains(&issued), "it can be revoked: {list}");
        done.unwrap_err().to_string()
    };
    let said = end("full", |reply| reply.failed("the disk is\nfull").unwrap());
    assert!(said.contains("could not join: the disk is\\nfull"), "{said}");
    let said = end("killed", drop);
    assert!(said.contains("has not said that its files are written"), "{said}");
}

#[test]
fn a_configuration_too_long_for_a_message_is_refused_before_anybody_comes() {
    let folder = tempfile::tempdir().unwrap();
    authority(folder.path());
    let of = |bytes: usize| {
        let (names, text) = (vec!["hostb".to_owned()], Some("#".repeat(bytes)));
        Offer::new(Authority::at(folder.path()), names, 9, text, any(), LONG)
    };
    let said = of(65_000).unwrap_err().to_string();
    assert!(said.contains("65000 bytes") && said.contains("limit 65536"), "{said}");
    // The longest that is taken is delivered.
    let longest = (0..65_000).rev().step_by(16).find(|bytes| of(*bytes).is_ok()).unwrap();
    let offer = of(longest).unwrap();
    let (address, token) = (offer.address().unwrap().to_string(), offer.token().clone());
    let (done, joined) = while_offered(&offer, || join(&address, &token).unwrap());
    done.unwrap();
    assert_eq!(joined.configuration.unwrap().len(), longest);
}

#[test]
fn an_offer_expires() {
    let folder = tempfile::tempdir().unwrap();
    let (offer, address, token) = offer_for(folder.path(), Duration::ZERO);
    let (done, ()) = while_offered(&offer, || ());
    assert!(done.unwrap_err().to_string().contains("in time"));
    drop(offer);
    assert!(join(&address, &token).unwrap_err().to_string().contains("cannot connect"));
}

#[test]
fn names_that_no_certificate_can_have_are_refused_before_anybody_comes() {
    let folder = tempfile::tempdir().unwrap();
    let of = |names: &[&str]| {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        Offer::new(Authority::at(folder.path()), names, 9, None, any(), LONG)
            .unwrap_err()
            .to_string()
    };
    assert!(of(&["a"]).contains("ca.pem"), "there is no CA");
    authority(folder.path());
    assert!(of(&["../x"]).contains("../x"));
}
