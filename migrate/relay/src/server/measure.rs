//! The receiver's part in a measurement of the link (W4c): reads bytes, and reports their rate.

use super::greeting::refuse;
use crate::link_rate::{Measured, MOST_TIME, TARGET};
use session::{write_preamble, Hello, Link, SessionError, Welcome};
use std::io::{ErrorKind, Read};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The most measurements at a time: each needs a thread, and takes all that the link carries.
const AT_A_TIME: usize = 16;
/// How long the other end may take to begin, and to close the connection once it has the answer.
const PATIENCE: Duration = Duration::from_secs(5);

static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// The duration of the measurement, if the peer's hello asks for one, or a message for the peer.
pub(super) fn wanted(hello: &Hello) -> Option<Result<Duration, String>> {
    let time = hello.name.as_deref()?.strip_prefix(TARGET)?;
    let time = time.parse().ok().map(Duration::from_millis).filter(|time| *time <= MOST_TIME);
    Some(time.ok_or_else(|| {
        format!("a measurement takes {TARGET}MILLISECONDS, at most {}", MOST_TIME.as_millis())
    }))
}

/// A place among the measurements.
#[derive(Debug)]
struct Place(());

impl Place {
    /// # Errors
    /// All are taken.
    fn take() -> Result<Self, String> {
        let free = |running| (running < AT_A_TIME).then_some(running + 1);
        let took = RUNNING.fetch_update(Ordering::AcqRel, Ordering::Acquire, free);
        took.map(|_| Self(()))
            .map_err(|_| format!("{AT_A_TIME} measurements run here, as many as may"))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Measures for a peer, or reports why not. `welcome` is the answer to the peer's hello.
pub(super) fn answer(
    mut link: Link,
    peer: &str,
    wanted: Result<Duration, String>,
    welcome: &Welcome,
) -> Result<(), SessionError> {
    match wanted.and_then(|time| Ok((time, Place::take()?))) {
        Ok((time, place)) => {
            write_preamble(&mut link, peer, welcome)?;
            serve(link, peer, time, &place)
        }
        Err(reason) => {
            refuse(&mut link, peer, &reason);
            Err(SessionError::Hello { peer: peer.into(), detail: reason })
        }
    }
}

/// Reads bytes for `time`, answers, and waits for the end of the connection.
fn serve(mut link: Link, peer: &str, time: Duration, _place: &Place) -> Result<(), SessionError> {
    let failed =
        |source| SessionError::Resource { what: "cannot set up a link's socket".into(), source };
    let mut buffer = vec![0; 256 << 10];
    let mut read = |link: &mut Link, until: Instant| -> Result<Option<u64>, SessionError> {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        link.socket().set_read_timeout(Some(left)).map_err(failed)?;
        match link.read(&mut buffer) {
            Ok(0) => Ok(None),
            Ok(got) => Ok(Some(got as u64)),
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) =>
            {
                Ok(Some(0))
            }
            Err(_) => Ok(None),
        }
    };
    let (mut measured, mut halfway) = (Measured::default(), None);
    let mut until = Instant::now() + PATIENCE;
    let mut began = None;
    while let Some(got) = read(&mut link, until)? {
        if got > 0 && began.is_none() {
            let now = Instant::now();
            began = Some(now);
            until = now + time;
        }
        measured.bytes += got;
        // Only the second half counts: the first half includes TCP's slow start.
        if halfway.is_none() && began.is_some_and(|began| began.elapsed() >= time / 2) {
            halfway = Some((Instant::now(), measured.bytes));
        }
    }
    if let Some((at, before)) = halfway {
        measured.bytes -= before;
        measured.micros = u64::try_from(at.elapsed().as_micros()).unwrap_or(u64::MAX);
    }
    write_preamble(&mut link, peer, &measured)?;
    let until = Instant::now() + PATIENCE;
    while read(&mut link, until)?.is_some() {}
    Ok(())
}
