//! Who may be talked to without encryption (until TLS comes): this host, or anybody with `--insecure`.

use anyhow::{bail, Context};
use relay::RelayError;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};

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

/// Refuses an address that is not loopback, unless the user insists.
pub(crate) fn check(address: &str, insecure: bool) -> anyhow::Result<Vec<SocketAddr>> {
    let found = resolve(address)?;
    if !insecure && found.iter().any(|address| !address.ip().is_loopback()) {
        return Err(RelayError::Insecure { address: address.to_string() }.into());
    }
    Ok(found)
}

/// Listens on a checked address.
pub(crate) fn listen(address: &str, insecure: bool) -> anyhow::Result<TcpListener> {
    let found = check(address, insecure)?;
    TcpListener::bind(&found[..]).with_context(|| format!("cannot listen on {address}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_without_insecure() {
        assert!(check("127.0.0.1:1", false).is_ok());
        assert!(check("[::1]:1", false).is_ok());
        let error = check("192.0.2.1:1", false).unwrap_err().to_string();
        assert!(error.contains("--insecure"), "{error}");
        assert!(check("192.0.2.1:1", true).is_ok());
        assert!(check("nonsense", true).is_err());
    }
}
