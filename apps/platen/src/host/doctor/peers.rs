//! Checks the other hosts: whether they are reached, who they are, their version, their clock and
//! the MTU.
//!
//! The check sends the service a hello for a target of a fixed name, which opens nothing; the
//! refusal's reason carries the answer. A service of a version without it answers that there is no
//! such door. The target's name is as long as a hello allows, so that packets of full size have to
//! arrive.

use super::super::question::{ask, of_doctor, Told};
use super::super::settings::Settings;
use super::Finding;
use host::{now, HostEntry};
use session::SessionError;
use socket2::SockRef;
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};
use tls::{Connector, TlsError};

/// How long another host may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);
/// Largest number of hosts that are asked at a time.
const AT_A_TIME: usize = 8;
/// Difference of clocks, beyond what the answer took: a warning, and a failure.
const CLOCK_WARN: u64 = 2_000;
const CLOCK_FAIL: u64 = 300_000;
/// The largest MTU that is compared: a segment has at most half of the first window, of 64 KiB.
const MAX_MTU: u32 = 16_384;
/// Bytes of a packet that are not TCP's payload, at most: addresses and options.
const OVERHEAD: u32 = 120;

/// Checks all other hosts.
pub(super) fn check(settings: &Settings) -> Vec<Finding> {
    let others: Vec<_> = settings.others().collect();
    let mut findings = Vec::new();
    for some in others.chunks(AT_A_TIME) {
        std::thread::scope(|scope| {
            let asked: Vec<_> =
                some.iter().map(|host| scope.spawn(|| check_one(settings, host))).collect();
            for (host, asked) in some.iter().zip(asked) {
                let died =
                    || vec![Finding::fail(&named(host), "its check has panicked", "report it")];
                findings.extend(asked.join().unwrap_or_else(|_| died()));
            }
        });
    }
    findings
}

fn named(host: &HostEntry) -> String {
    format!("peer {}", host.name)
}

fn check_one(settings: &Settings, host: &HostEntry) -> Vec<Finding> {
    let check = named(host);
    let to = host.address_with(settings.config.port);
    let socket = match connect(&to) {
        Ok(socket) => socket,
        Err(error) => {
            let advice = "start platen there (systemctl enable --now platen); open its port in \
                          firewalls; check `address` in platen.toml";
            return vec![Finding::fail(&check, format!("cannot connect to {to}: {error}"), advice)];
        }
    };
    let mut findings = vec![mtu(&check, &socket)];
    drop(socket);
    let connector = settings.credentials().and_then(|own| Ok(Connector::new(&own, &host.name)?));
    let connector = match connector {
        Ok(connector) => connector,
        // The check of the certificate has said so.
        Err(error) => {
            let advice = "first give this host a certificate";
            findings.push(Finding::fail(&check, format!("{error:#}"), advice));
            return findings;
        }
    };
    let begun = (Instant::now(), now());
    let answer = ask::<Told>(&to, &connector, settings.config.page_size, of_doctor());
    let took = u64::try_from(begun.0.elapsed().as_millis()).unwrap_or(u64::MAX);
    match answer {
        Ok(told) => {
            findings.push(version(&check, &told.version));
            findings.push(clock(&check, begun.1, took, told.clock));
        }
        Err(error) => findings.push(refused(&check, &error)),
    }
    findings
}

fn connect(to: &str) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address");
    for address in to.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn refused(check: &str, error: &SessionError) -> Finding {
    let said: String = error.to_string().chars().take(300).collect();
    match error {
        SessionError::Refused { reason, .. } if reason.contains("no door") => Finding::warn(
            check,
            "its platen is older than this one: it does not tell its version and its clock",
            "install the same platen on all hosts",
        ),
        SessionError::Refused { .. } => {
            Finding::fail(check, said, "give both hosts the same platen.toml")
        }
        SessionError::Tls(TlsError::Late { .. }) => Finding::fail(
            check,
            said,
            "is that host overloaded, or its service stopped? Is it platen that listens there?",
        ),
        SessionError::Tls(_) if said.contains("revoked") => Finding::fail(
            check,
            said,
            "give the host of that certificate another one (platen host add), or take the \
             fingerprint out of `revoked` and reload the service",
        ),
        SessionError::Tls(_) => Finding::fail(
            check,
            said,
            "both hosts need certificates of the same CA, with the name of platen.toml in them",
        ),
        _ => Finding::fail(
            check,
            format!("it accepts connections and does not answer: {said}"),
            "is it platen that listens there? If so, packets of full size may get lost: compare the \
             MTU of both hosts and of the network between them (ping -M do -s SIZE)",
        ),
    }
}

fn version(check: &str, version: &str) -> Finding {
    let ours = env!("CARGO_PKG_VERSION");
    let version: String = version.chars().take(40).collect();
    if version == ours {
        return Finding::ok(check, format!("platen {version}"));
    }
    let found = format!("platen {version} there, {ours} here");
    Finding::warn(check, found, "install the same platen on all hosts")
}

/// Compares the clocks. `begun` is the time of the question, `took` the milliseconds until the
/// answer, `there` the time in it.
fn clock(check: &str, begun: u64, took: u64, there: u64) -> Finding {
    let behind = begun.saturating_sub(there);
    let ahead = there.saturating_sub(begun.saturating_add(took));
    let differ = behind.max(ahead);
    let way = if ahead > 0 { "ahead of" } else { "behind" };
    let found = format!("its clock is {}.{:03} s {way} this one", differ / 1000, differ % 1000);
    let advice = "run an NTP client on both hosts (chrony, systemd-timesyncd)";
    match differ {
        CLOCK_FAIL.. => Finding::fail(check, found, advice),
        CLOCK_WARN.. => Finding::warn(check, found, advice),
        _ => Finding::ok(check, "its clock agrees"),
    }
}

fn mtu(check: &str, socket: &TcpStream) -> Finding {
    let sizes = SockRef::from(socket).tcp_mss().ok().zip(path_mtu(socket));
    sizes.map_or_else(
        || Finding::warn(check, "the MTU cannot be told", "look at `ip link` on both hosts"),
        |(segment, mtu)| sizes_agree(check, segment, mtu),
    )
}

fn path_mtu(socket: &TcpStream) -> Option<u32> {
    use rustix::net::sockopt::{ip_mtu, ipv6_mtu};
    let is_v4 = socket.peer_addr().ok()?.is_ipv4();
    if is_v4 { ip_mtu(socket) } else { ipv6_mtu(socket) }.ok()
}

/// Compares the segment size, which both ends limit, with this end's MTU.
fn sizes_agree(check: &str, segment: u32, mtu: u32) -> Finding {
    if segment + OVERHEAD < mtu.min(MAX_MTU) {
        return Finding::warn(
            check,
            format!(
                "the MTU is {mtu} here, and segments have {segment} bytes: it is smaller there"
            ),
            "give both hosts and the network between them the same MTU",
        );
    }
    Finding::ok(check, format!("reached; the MTU is {mtu}"))
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn clocks_that_differ_are_told_by_how_much() {
        let judged = |there| clock("c", 1_000_000, 500, there);
        assert_eq!(judged(1_000_000).verdict, Verdict::Ok);
        assert_eq!(judged(1_000_500 + CLOCK_WARN - 1).verdict, Verdict::Ok);
        let ahead = judged(1_000_500 + CLOCK_WARN);
        assert_eq!(
            (ahead.verdict, ahead.found.contains("2.000 s ahead of")),
            (Verdict::Warn, true)
        );
        let behind = judged(1_000_000 - CLOCK_FAIL);
        assert_eq!(
            (behind.verdict, behind.found.contains("300.000 s behind")),
            (Verdict::Fail, true)
        );
        assert_eq!(clock("c", 1, u64::MAX, u64::MAX).verdict, Verdict::Ok);
    }

    #[test]
    fn versions_and_packets_are_compared() {
        assert_eq!(version("v", env!("CARGO_PKG_VERSION")).verdict, Verdict::Ok);
        assert_eq!(version("v", "0.0.1").verdict, Verdict::Warn);
        assert_eq!(sizes_agree("m", 1448, 1500).verdict, Verdict::Ok);
        assert_eq!(sizes_agree("m", 1448, 9000).verdict, Verdict::Warn);
        assert_eq!(sizes_agree("m", 32_741, 65_535).verdict, Verdict::Ok);
    }

    #[test]
    fn a_host_that_does_not_answer_is_a_failure() {
        let refused_by = |reason: &str| {
            refused("p", &SessionError::Refused { peer: "b".into(), reason: reason.into() }).verdict
        };
        assert_eq!(refused_by("'doctor:...' is no door of this host"), Verdict::Warn);
        assert_eq!(refused_by("the source has page size 4096"), Verdict::Fail);
        let silent = SessionError::LinkLost { peer: "b".into(), detail: "closed".into() };
        let found = refused("p", &silent);
        assert!(found.advice.unwrap().contains("MTU"));
        assert!(connect("127.81.9.9:9").is_err());
    }
}
