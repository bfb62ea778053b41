//! The connection between the relays: mutual TLS, or plain TCP with `--insecure`.

use crate::relay_options::TlsOptions;
use anyhow::{bail, Context};
use socket2::{Domain, Socket, Type};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use tls::{Acceptor, Connector, Credentials, TlsError};

fn resolve(address: &str) -> anyhow::Result<Vec<SocketAddr>> {
    let found = address.to_socket_addrs().with_context(|| {
        format!("'{address}' is not HOST:PORT with a HOST that can be resolved")
    })?;
    let found: Vec<_> = found.collect();
    if found.is_empty() {
        bail!("'{address}' resolves to no address");
    }
    Ok(found)
}

/// Begins the error if there is no certificate. For a broken certificate it would hide the defect.
const WITHOUT: &str = "both hosts show certificates (--insecure does without: guest memory then \
                       crosses the network in the clear, and whoever reaches the port can deliver a \
                       VM, or read the images that it serves)";

/// Reads this host's certificate. If there is none, the error says what to do.
fn credentials(options: &TlsOptions) -> anyhow::Result<Credentials> {
    let (ca, cert, key) = options.paths();
    let credentials = Credentials::load(&ca, &cert, &key).map_err(|error| match error {
        missing @ TlsError::Missing { .. } => anyhow::Error::new(missing).context(WITHOUT),
        broken => broken.into(),
    })?;
    credentials.check_dates()?;
    Ok(credentials)
}

/// The HOST of HOST:PORT, without the brackets of an IPv6 address.
fn host(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// Makes TLS for links to `peer`, whose certificate must contain that name or `--peer-name`; `None`
/// with `--insecure`.
pub(crate) fn connector(
    options: &TlsOptions,
    peer: &str,
    name: Option<&str>,
) -> anyhow::Result<Option<Connector>> {
    resolve(peer)?;
    if options.insecure {
        return Ok(None);
    }
    Ok(Some(Connector::new(&credentials(options)?, name.unwrap_or_else(|| host(peer)))?))
}

/// Makes TLS for links to this host; `None` with `--insecure`.
pub(crate) fn acceptor(options: &TlsOptions, names: &[String]) -> anyhow::Result<Option<Acceptor>> {
    if options.insecure {
        return Ok(None);
    }
    Ok(Some(Acceptor::new(&credentials(options)?, names)?))
}

/// A directory that only this user can open, for sockets. It is removed with the value.
pub(crate) fn private_dir() -> anyhow::Result<tempfile::TempDir> {
    let dir = tempfile::Builder::new().prefix("platen-").tempdir();
    dir.context("cannot make a private directory")
}

/// Connections that wait until they are accepted, as in the standard library.
const BACKLOG: i32 = 128;

/// All addresses of this host, for [`bind`]. A kernel without IPv6 takes the second.
pub(crate) fn all_at(port: u16) -> [SocketAddr; 2] {
    let all = [IpAddr::from(Ipv6Addr::UNSPECIFIED), Ipv4Addr::UNSPECIFIED.into()];
    all.map(|address| SocketAddr::new(address, port))
}

/// Listens at the first of these addresses that can be had.
pub(crate) fn bind(addresses: &[SocketAddr]) -> io::Result<TcpListener> {
    let mut failed = io::Error::from(ErrorKind::InvalidInput);
    for address in addresses {
        let socket = Socket::new(Domain::for_address(*address), Type::STREAM, None);
        match socket.and_then(|socket| listening(socket, *address)) {
            Ok(listener) => return Ok(listener),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

fn listening(socket: Socket, address: SocketAddr) -> io::Result<TcpListener> {
    if address.is_ipv6() && address.ip().is_unspecified() {
        // Also where net.ipv6.bindv6only is 1.
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Listens for links.
pub(crate) fn listen(address: &str) -> anyhow::Result<TcpListener> {
    let found = resolve(address)?;
    bind(&found).map_err(|error| {
        let remedy = match error.kind() {
            ErrorKind::AddrInUse => {
                " (another process listens there, which ss -ltnp shows: end it, or choose another port)"
            }
            ErrorKind::AddrNotAvailable => " (this host has no such address, as ip addr shows)",
            _ => "",
        };
        anyhow::Error::new(error).context(format!("cannot listen on {address}{remedy}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;
    use tls::Authority;

    #[test]
    fn all_addresses_are_those_of_ipv4_too_whatever_the_kernel_s_default_is() {
        let at = all_at(0)[0];
        let socket = Socket::new(Domain::for_address(at), Type::STREAM, None).unwrap();
        // As each socket is where net.ipv6.bindv6only is 1.
        socket.set_only_v6(true).unwrap();
        let listener = listening(socket, at).unwrap();
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        // One address of IPv6 stays one.
        let socket = Socket::new(Domain::IPV6, Type::STREAM, None).unwrap();
        socket.set_only_v6(true).unwrap();
        let listener = listening(socket, (Ipv6Addr::LOCALHOST, 0).into()).unwrap();
        assert!(socket2::SockRef::from(&listener).only_v6().unwrap());
        let taken = bind(&[listener.local_addr().unwrap()]).unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::AddrInUse);
        let second = [listener.local_addr().unwrap(), (Ipv4Addr::LOCALHOST, 0).into()];
        assert!(bind(&second).unwrap().local_addr().unwrap().is_ipv4());
    }

    fn options(dir: &std::path::Path, insecure: bool) -> TlsOptions {
        TlsOptions { tls_dir: dir.into(), tls_ca: None, tls_cert: None, tls_key: None, insecure }
    }

    #[test]
    fn without_certificates_a_migration_needs_insecure() {
        let folder = tempfile::tempdir().unwrap();
        let safe = options(folder.path(), false);
        for peer in ["127.0.0.1:1", "[::1]:1", "192.0.2.1:1"] {
            let error = format!("{:#}", connector(&safe, peer, None).unwrap_err());
            assert!(error.contains("--insecure") && error.contains("platen cert"), "{error}");
            assert!(connector(&options(folder.path(), true), peer, None).unwrap().is_none());
        }
        let error = format!("{:#}", acceptor(&safe, &[]).unwrap_err());
        assert!(error.contains("--insecure") && error.contains("ca.pem"), "{error}");
        assert!(acceptor(&options(folder.path(), true), &[]).unwrap().is_none());
        assert!(connector(&safe, "nonsense", None).is_err());
    }

    #[test]
    fn a_broken_certificate_is_what_the_error_begins_with() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::at(folder.path());
        authority.init(false).unwrap();
        let issued = authority.issue(&["127.0.0.1".into()], 9, false).unwrap();
        let options = options(&issued.dir, false);
        let (_, cert, _) = options.paths();
        std::fs::write(&cert, "not a certificate").unwrap();
        let error = format!("{:#}", acceptor(&options, &[]).unwrap_err());
        assert!(error.starts_with(&cert.display().to_string()), "{error}");
    }

    #[test]
    fn with_certificates_links_are_secured() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::at(folder.path());
        authority.init(false).unwrap();
        let issued = authority.issue(&["127.0.0.1".into()], 9, false).unwrap();
        let options = options(&issued.dir, false);
        assert!(connector(&options, "127.0.0.1:1", None).unwrap().is_some());
        assert!(connector(&options, "[::1]:1", Some("there")).unwrap().is_some());
        assert!(connector(&options, "127.0.0.1:1", Some("not a name")).is_err());
        assert!(acceptor(&options, &["here".into()]).unwrap().is_some());
    }

    #[test]
    fn the_host_of_a_peer_is_its_name() {
        assert_eq!(host("there.example:4444"), "there.example");
        assert_eq!(host("10.0.0.2:4444"), "10.0.0.2");
        assert_eq!(host("[fe80::2]:4444"), "fe80::2");
    }
}
