//! Finds the carriers of an earlier service again.

use super::records::socket_of;
use super::{door_of, Found, Registry};
use crate::channel::Channel;
use crate::error::HostError;
use crate::listener::DoorListener;
use crate::record::{Phase, Record};
use rustix::fd::OwnedFd;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The most time that all carriers together may take to report the state of their migrations.
pub(super) const FIRST_WORD: Duration = Duration::from_secs(2);
/// The wait for a carrier after that time. A receive without any wait would wait for ever.
const LAST_LOOK: Duration = Duration::from_millis(1);
/// Interval of attempts to reach a carrier that could not be reached.
const AGAIN: Duration = Duration::from_millis(100);
/// The most time that a carrier whose process exists may take to listen at its socket: its record
/// comes first.
const LISTENS: Duration = Duration::from_secs(10);

/// Whether a carrier that cannot be reached for this reason may have ended: nothing listens at its
/// socket.
fn is_absence(error: &io::Error) -> bool {
    [io::ErrorKind::NotFound, io::ErrorKind::ConnectionRefused].contains(&error.kind())
}

/// Whether the process of this number is a carrier: the number may be another process's by now.
pub(super) fn is_carrier(pid: u32) -> bool {
    is_carrier_at(&Path::new("/proc").join(pid.to_string()))
}

pub(super) fn is_carrier_at(process: &Path) -> bool {
    // The registry is this user's, and so are its carriers. The kernel reads a command line from
    // the process's memory, on which another user can hold a lock for ever.
    let me = rustix::process::geteuid().as_raw();
    if !fs::metadata(process).is_ok_and(|process| process.uid() == me) {
        return false;
    }
    let command = fs::read(process.join("cmdline")).unwrap_or_default();
    command.split(|byte| *byte == 0).any(|word| word == b"carry")
}

/// A carrier's first message: its record, with the listening socket of its door.
type FirstWord = io::Result<Option<(Record, Option<OwnedFd>)>>;

/// A carrier's first message. After `until`, one that has come already is read.
fn first_word(channel: &Channel, until: Instant) -> Result<FirstWord, HostError> {
    let failed = || HostError::system("cannot wait for a carrier");
    let left = until.saturating_duration_since(Instant::now());
    channel.set_patience(Some(left.max(LAST_LOOK))).map_err(failed())?;
    let first = channel.receive::<Record>();
    channel.set_patience(None).map_err(failed())?;
    Ok(first)
}

impl Registry {
    /// Finds the carriers of an earlier service again.
    ///
    /// # Errors
    /// The folder cannot be read, or the system refuses threads.
    pub fn find_again(self: &Arc<Self>) -> Result<Found, HostError> {
        self.find_those(self.stored()?)
    }

    /// Finds the carriers of these records, which were read before. All of them have the same time
    /// to answer: a service with many stopped carriers must not start late.
    pub(super) fn find_those(self: &Arc<Self>, records: Vec<Record>) -> Result<Found, HostError> {
        let mut found = Found::default();
        let running = records.into_iter().filter(|record| record.phase != Phase::Ended);
        let reached: Vec<_> = running
            .map(|record| (Channel::connect(&socket_of(&self.folder, &record.id)), record))
            .collect();
        let until = Instant::now() + FIRST_WORD;
        for (channel, record) in reached {
            let channel = match channel {
                Ok(channel) => channel,
                // The process may live on behind the end, to write a seed.
                Err(error)
                    if is_absence(&error)
                        && (!is_carrier(record.pid) || self.has_ended(&record.id)) =>
                {
                    self.bury_unless_ended(&record);
                    continue;
                }
                // The carrier does not listen yet, or was stopped when as many services as may wait
                // had come and gone. Its place is not free.
                Err(_) => {
                    found.running += 1;
                    let has_door = record.holds_port;
                    self.know(None, record, has_door)?;
                    continue;
                }
            };
            let (record, has_door) = match first_word(&channel, until)? {
                Ok(Some((now, listener))) => {
                    let has_door = listener.is_some();
                    if let Some(listener) = listener.map(DoorListener::from) {
                        found.doors.push((door_of(&now), listener));
                    }
                    (now, has_door)
                }
                // The carrier was stopped or does not answer in time, and is heard when it goes on.
                // Or it is of another version.
                Err(error)
                    if [io::ErrorKind::WouldBlock, io::ErrorKind::InvalidData]
                        .contains(&error.kind()) =>
                {
                    let has_door = record.holds_port;
                    (record, has_door)
                }
                _ => {
                    self.bury_unless_ended(&record);
                    continue;
                }
            };
            found.running += 1;
            self.know(Some(Arc::new(channel)), record, has_door)?;
        }
        Ok(found)
    }

    /// Waits until a carrier can be reached; `None` if it has gone.
    pub(super) fn reach(&self, record: &Record) -> Option<Arc<Channel>> {
        let (path, until) = (socket_of(&self.folder, &record.id), Instant::now() + LISTENS);
        let channel = loop {
            match Channel::connect(&path) {
                Ok(channel) => break Arc::new(channel),
                Err(error) if is_absence(&error) => {
                    let has_gone = !is_carrier(record.pid) || self.has_ended(&record.id);
                    if has_gone || Instant::now() >= until {
                        return None;
                    }
                }
                // It is stopped, for as long as that takes.
                Err(_) => {}
            }
            std::thread::sleep(AGAIN);
        };
        if let Some(known) = self.lock().get_mut(&record.id) {
            known.channel = Some(channel.clone());
        }
        Some(channel)
    }
}
