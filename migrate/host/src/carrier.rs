//! A carrier's end of its channels: its record, which every service gets, and the links that
//! services pass to it.

use crate::channel::{Channel, Post};
use crate::error::HostError;
use crate::listener::DoorListener;
use crate::order::Order;
use crate::record::{now, Phase, Record, Status};
use crate::registry::{folder, socket_of, write_record};
use rustix::fd::AsFd;
use std::io;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Pause after a failure to accept a service.
const BACK_OFF: Duration = Duration::from_millis(100);

/// The most bytes of a cause, parts of which the other host may have sent. With this limit, the
/// status of a service with all its migrations and causes stays below the limit of an answer.
const MAX_CAUSE: usize = 2000;

/// Links, each with the address of the other host.
type Links = Sender<(TcpStream, String)>;

/// The process that carries a migration, as services see it.
#[derive(Debug)]
pub struct Carrier {
    folder: PathBuf,
    /// The door's listening socket, which a new service gets.
    door: Option<DoorListener>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    record: Record,
    /// There is more than one while one service takes over from another.
    services: Vec<Arc<Channel>>,
}

impl Carrier {
    /// Makes this process a carrier. `service` has started it; from now on other services can reach
    /// it.
    ///
    /// # Errors
    /// The folder below `run_dir` cannot be used.
    pub fn start(
        run_dir: &Path,
        record: Record,
        service: Channel,
        door: Option<DoorListener>,
        links: Links,
    ) -> Result<Arc<Self>, HostError> {
        let folder = folder(run_dir)?;
        let socket = socket_of(&folder, &record.id);
        let failed = || HostError::system(format!("cannot listen at {}", socket.display()));
        // The record comes first: a socket without a record would not be found.
        write_record(&folder, &record)
            .map_err(HostError::system(format!("cannot write to {}", folder.display())))?;
        let post = Post::listen(&socket).map_err(failed())?;
        let state = Mutex::new(State { record, services: Vec::new() });
        let carrier = Arc::new(Self { folder, door, state });
        carrier.follow(service, links.clone()).map_err(failed())?;
        let accepting = carrier.clone();
        let accept = move || loop {
            match post.accept() {
                Ok(service) => drop(accepting.follow(service, links.clone())),
                // No descriptor or memory is left, perhaps only for a moment. A carrier that a new
                // service cannot reach counts as killed, and its port as free.
                Err(_) => std::thread::sleep(BACK_OFF),
            }
        };
        spawn("services", accept).map_err(failed())?;
        Ok(carrier)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports to a service how the migration stands, and takes its links until the service has
    /// gone.
    fn follow(&self, service: Channel, links: Links) -> io::Result<()> {
        let service = Arc::new(service);
        {
            let mut state = self.lock();
            service.send(&state.record, self.door.as_ref().map(AsFd::as_fd))?;
            state.services.push(service.clone());
        }
        spawn("service", move || {
            loop {
                match service.receive::<Order>() {
                    Ok(Some((Order::Link(peer), Some(link)))) => {
                        let _ = links.send((link.into(), peer));
                    }
                    // The order is of another version.
                    Ok(Some(_)) => {}
                    Err(error) if error.kind() == io::ErrorKind::InvalidData => {}
                    Ok(None) | Err(_) => break,
                }
            }
        })
    }

    /// Changes the record, and sends it to the services if it has changed.
    pub fn update(&self, change: impl FnOnce(&mut Record)) {
        let mut state = self.lock();
        let before = state.record.clone();
        change(&mut state.record);
        if state.record.phase != before.phase {
            state.record.since = now();
        }
        if matches!(state.record.phase, Phase::Opening | Phase::Active) {
            state.record.reached = state.record.phase;
        }
        if state.record != before {
            let State { record, services } = &mut *state;
            // A service that does not read, or has gone, asks again if it comes back.
            services.retain(|service| {
                let sent = service.send(record, None);
                !matches!(sent, Err(error) if error.kind() != io::ErrorKind::WouldBlock)
            });
        }
    }

    /// A copy of the record as it is now.
    pub fn record(&self) -> Record {
        self.lock().record.clone()
    }

    /// Records the outcome. Call this last.
    pub fn end(&self, status: Status, cause: Option<String>) {
        self.update(|record| {
            record.phase = Phase::Ended;
            record.holds_port = false;
            record.ended = Some(now());
            record.status = Some(status);
            record.cause = cause.map(|cause| cut(cause, MAX_CAUSE));
        });
        let mut state = self.lock();
        // Then the end of the channel follows, at which the service reads the record.
        let _ = write_record(&self.folder, &state.record);
        let _ = std::fs::remove_file(socket_of(&self.folder, &state.record.id));
        for service in state.services.drain(..) {
            let _ = rustix::net::shutdown(&*service, rustix::net::Shutdown::Both);
        }
    }
}

/// Cuts the text to `most` bytes, with a mark if something is missing.
fn cut(mut text: String, most: usize) -> String {
    if text.len() > most {
        let end = (0..=most).rev().find(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or_default());
        text.push_str(" ...");
    }
    text
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
    std::thread::Builder::new().name(name.into()).spawn(body).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_cut_between_characters() {
        assert_eq!(cut("short".into(), 5), "short");
        assert_eq!(cut("a\u{fc}b".into(), 2), "a ...");
        assert_eq!(cut("x".repeat(9000), MAX_CAUSE).len(), MAX_CAUSE + 4);
    }
}
