//! Makes a stream's connection to QEMU, and writes the stream's bytes to it. Each write waits for
//! its barriers.

use super::super::barrier::Wait;
use super::super::read_back;
use super::super::shared::Event;
use super::{Delivery, Stop};
use crate::error::error_chain;
use crate::qemu_socket::QemuSocket;
use crate::threads::spawn;
use pages::Slot;
use session::SessionError;
use std::io::{self, Write};
use std::sync::atomic::Ordering;
use std::time::Duration;
use stream::Kind;

/// How long the destination QEMU may take to start listening.
const PATIENCE: Duration = Duration::from_secs(5);
/// The number of bytes by which QEMU tells the kind of a connection.
const GREETING: usize = 4;

impl Delivery<'_> {
    /// Writes bytes of a multifd channel. QEMU stops reading the channel after each SYNC until main
    /// has reached the barrier, so each SYNC counts as written before the bytes behind it are.
    pub(super) fn write_channel(&self, bytes: &[u8]) -> Result<(), Stop> {
        let facts = self.tokeniser.facts();
        let ends = self.tokeniser.sync_ends();
        let mut done = 0;
        for (syncs, end) in (facts.syncs - ends.len() as u64 + 1..).zip(ends) {
            self.write(&bytes[done..*end])?;
            done = *end;
            self.shared.barriers.handed(self.stream, syncs);
        }
        self.write(&bytes[done..])?;
        if facts.opaque && self.kind == Some(Kind::Multifd) {
            // The SYNCs of this channel can no longer be counted. A barrier at which QEMU waits is
            // better than a barrier that never comes.
            self.shared.barriers.handed(self.stream, u64::MAX);
        }
        Ok(())
    }

    /// Writes a part of a main chunk; waits at each barrier marker (W18).
    pub(super) fn write_main(
        &mut self,
        chunk: &Slot,
        from: usize,
        to: usize,
        markers: &[(usize, u64)],
        channels: u32,
    ) -> Result<(), Stop> {
        let mut done = from;
        for (at, marker) in markers.iter().filter(|(at, _)| (from..to).contains(at)) {
            self.write(&chunk[done..*at])?;
            done = *at;
            self.wait_for_syncs(channels, *marker, "its main channel")?;
        }
        self.write(&chunk[done..to])
    }

    /// Waits until QEMU has got SYNC number `syncs` on each of `channels` multifd channels.
    /// `whose`: the channel that has come so far.
    pub(super) fn wait_for_syncs(
        &self,
        channels: u32,
        syncs: u64,
        whose: &str,
    ) -> Result<(), Stop> {
        let session = &self.shared.session;
        let stop = || session.failure().is_some() || self.shared.over.load(Ordering::Acquire);
        match self.shared.barriers.wait(channels, syncs, stop) {
            Wait::Passed => Ok(()),
            Wait::Stopped => Err(Stop::Over),
            Wait::Never { stream, syncs: last } => {
                let reason = format!(
                    "multifd stream {stream} of the source QEMU ended after {last} SYNCs, and \
                     {whose} is at SYNC {syncs}: the source QEMU has ended, or closed a channel"
                );
                Err(SessionError::Local { reason }.into())
            }
        }
    }

    fn write(&self, bytes: &[u8]) -> Result<(), Stop> {
        // Written already, when the connection was made.
        let greeted = self.greeted.get().min(bytes.len());
        self.greeted.set(self.greeted.get() - greeted);
        let bytes = &bytes[greeted..];
        if greeted > 0 && self.is_main() {
            self.shared.main_is_up();
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let Some(socket) = &self.socket else { return Ok(()) };
        let mut socket: &QemuSocket = socket;
        if let Err(error) = socket.write_all(bytes) {
            let error = self.explain(&error);
            if self.is_main() {
                return Err(Stop::Qemu(error));
            }
            let gone = Event::WriterGone { stream: self.stream, is_channel: true, error };
            let _ = self.shared.events.send(gone);
            if !self.shared.wait_for_confirmation() {
                return Err(Stop::Over);
            }
            // QEMU has confirmed: bytes that it did not read count as written, or the source would
            // never learn of the success.
            return Ok(());
        }
        if self.is_main() {
            self.shared.main_is_up();
        }
        Ok(())
    }

    fn explain(&self, error: &io::Error) -> String {
        format!("the destination QEMU no longer takes the stream ({error}): it refused it or ended, see its log")
    }

    /// Makes the stream's connection (W19): the main connection is made first, and each connection
    /// only when there are bytes to write, except for the preempt channel. `bytes` are the stream's
    /// next bytes. The first few of them go out with the connection; they start no VM.
    pub(super) fn connect(&mut self, bytes: &[u8]) -> Result<(), Stop> {
        if self.socket.is_some() {
            return Ok(());
        }
        let is_main = self.is_main();
        if !is_main && !self.shared.wait_for_main() {
            return Err(Stop::Over);
        }
        if is_main && !self.shared.host_listens().map_err(Stop::Qemu)? {
            return Err(Stop::Over);
        }
        let greeting = &bytes[..bytes.len().min(GREETING)];
        let socket = self.shared.connect(PATIENCE, is_main, greeting);
        let socket = match socket {
            Ok(Some(socket)) => socket,
            Ok(None) => return Err(Stop::Over),
            Err(error) => return Err(Stop::Qemu(error_chain(&error))),
        };
        if is_main {
            let (shared, stream, socket) = (self.shared.clone(), self.stream, socket.clone());
            if spawn("return-path", move || read_back::run(&shared, stream, &socket)).is_err() {
                let _ = self.shared.events.send(Event::QemuEof { unread: false });
            }
        }
        self.greeted.set(greeting.len());
        self.socket = Some(socket);
        Ok(())
    }
}
