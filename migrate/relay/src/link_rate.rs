//! The rate of the links to a receiver, measured by bytes that it discards (W4c).

use rustix::net::sockopt::set_socket_linger;
use serde::{Deserialize, Serialize};
use session::{dial, read_preamble, Hello, Link, SessionError};
use std::io::Write;
use std::time::{Duration, Instant};
use tls::Connector;

/// The target of a hello that asks for a measurement, before the milliseconds.
pub(crate) const TARGET: &str = "measure:";
/// The longest measurement.
pub(crate) const MOST_TIME: Duration = Duration::from_secs(10);
/// How long the answer may take beyond the measurement.
const ANSWER: Duration = Duration::from_secs(20);
/// How long a write may wait.
const WRITE: Duration = Duration::from_secs(10);
/// Bytes of a write. The bytes are random, and TLS makes each write differ.
const BLOCK: usize = 256 << 10;
/// Round trips of opening a link: TCP, TLS, and hello with welcome.
const TRIPS: u32 = 3;

/// The receiver's answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Measured {
    /// Bytes that came in that time.
    pub(crate) bytes: u64,
    /// Their time in microseconds; 0 if too few bytes came for a rate.
    pub(crate) micros: u64,
}

/// The rate that the links to a receiver carry.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkRate {
    /// Bytes per second of all links together, without headers.
    pub goodput: f64,
    /// The round trip time of the link that was opened fastest. It includes the time for
    /// cryptography.
    pub rtt: Duration,
}

/// Measures what `links` connections to the receiver at `peer` carry together, for `time` (10 s at
/// most). The receiver discards the bytes; no QEMU sees them.
///
/// # Errors
/// The peer cannot be reached, refuses, or does not support measurements.
pub fn measure_links(
    peer: &str,
    connector: Option<&Connector>,
    page_size: u32,
    links: u16,
    time: Duration,
) -> Result<LinkRate, SessionError> {
    let time = time.min(MOST_TIME);
    let name = Some(format!("{TARGET}{}", time.as_millis()));
    let hello = Hello { name, again: true, ..Hello::of_one_link(page_size)? };
    let mut rtt = Duration::MAX;
    let trips = if connector.is_some() { TRIPS } else { TRIPS - 1 };
    let open = || {
        let begun = Instant::now();
        let (link, _) = dial(peer, connector, &hello)?;
        rtt = rtt.min(begun.elapsed() / trips);
        Ok(link)
    };
    let opened: Vec<Link> =
        std::iter::repeat_with(open).take(links.into()).collect::<Result<_, SessionError>>()?;
    let rates: Vec<Result<f64, SessionError>> = std::thread::scope(|scope| {
        let running: Vec<_> =
            opened.into_iter().map(|link| scope.spawn(|| measure_one(link, peer, time))).collect();
        let died = || Err(SessionError::Local { reason: "a measurement has panicked".into() });
        running.into_iter().map(|one| one.join().unwrap_or_else(|_| died())).collect()
    });
    let goodput = rates.into_iter().sum::<Result<f64, SessionError>>()?;
    if goodput <= 0.0 {
        let reason = format!("no bytes came to {peer} in {} ms", time.as_millis());
        return Err(SessionError::Local { reason });
    }
    Ok(LinkRate { goodput, rtt })
}

/// Bytes per second over one connection.
fn measure_one(mut link: Link, peer: &str, time: Duration) -> Result<f64, SessionError> {
    let failed =
        |source| SessionError::Resource { what: "cannot set up a link's socket".into(), source };
    let mut block = vec![0; BLOCK];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| std::io::Read::read_exact(&mut file, &mut block))
        .map_err(failed)?;
    link.socket().set_write_timeout(Some(WRITE)).map_err(failed)?;
    // Bytes that are still under way when the answer has come are of no use.
    set_socket_linger(link.socket(), Some(Duration::ZERO)).map_err(|error| failed(error.into()))?;
    let until = Instant::now() + time;
    while Instant::now() < until {
        // If the connection was closed, the answer gives the reason.
        if link.write_all(&block).is_err() {
            break;
        }
    }
    let measured: Measured = read_preamble(&mut link, peer, ANSWER)?;
    if measured.micros == 0 {
        return Ok(0.0);
    }
    #[expect(clippy::cast_precision_loss, reason = "a rate; 53 bits are plenty")]
    let rate = measured.bytes as f64 / (measured.micros as f64 / 1e6);
    Ok(rate)
}
