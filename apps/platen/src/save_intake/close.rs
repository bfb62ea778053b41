//! The end of the connections of a save, and of the threads that record.

use super::Intake;
use anyhow::Context;
use image::Writer;
use std::io::{self, ErrorKind, Read};
use std::net::Shutdown;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Time limit for the threads to end. They may wait for a disk that hangs.
const ENDS: Duration = Duration::from_secs(5);
/// Time limit for QEMU to close its sockets after a cancel.
const CLOSES: Duration = Duration::from_secs(120);

impl Intake {
    /// Waits until QEMU, which has been told to cancel, closes its sockets. Returns the writer, and
    /// whether more bytes arrived.
    pub(crate) fn close(mut self) -> anyhow::Result<(Writer, bool)> {
        let writer = self.take_writer()?;
        let mut stream = self.stream.take().context("nothing is recorded")?;
        stream.set_read_timeout(Some(CLOSES)).context("QEMU's socket")?;
        let mut more = false;
        loop {
            match stream.read(&mut [0; 4096]) {
                Ok(0) => break,
                Ok(_) => more = true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
                // After an error, dropping the stream closes this end, and QEMU then has to close
                // its own.
                Err(_) => break,
            }
        }
        drop(stream);
        self.wait_for_channels();
        Ok((writer, more || self.has_late_pages()))
    }

    /// Waits until QEMU, whose migration is over, has closed its multifd channels.
    pub(crate) fn wait_for_channels(&mut self) {
        if self.multifd.is_none() {
            return;
        }
        let until = Instant::now() + CLOSES;
        let thread = self.thread.as_ref();
        while thread.is_some_and(|thread| !thread.is_finished()) && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        self.end();
    }

    /// Records no more. QEMU's multifd connections stay open, and are read, until [`Intake::end`].
    pub(crate) fn stop_recording(&self) {
        if let Some(multifd) = &self.multifd {
            multifd.abandon(io::Error::new(ErrorKind::ConnectionAborted, "the save was ended"));
            if let Some(keeper) = &self.keeper {
                keeper.read_on();
            }
        }
    }

    /// Ends the helper: QEMU has sent everything.
    pub(crate) fn dismiss_keeper(&mut self) {
        if let Some(keeper) = self.keeper.take().and_then(Arc::into_inner) {
            keeper.dismiss();
        }
    }

    /// Takes note that QEMU has refused to migrate, so it will not connect.
    pub(crate) fn call_off(&mut self) {
        let keeper = self.keeper.take();
        // The thread has the keeper, too.
        self.end();
        self.keeper = keeper;
        self.dismiss_keeper();
    }

    /// Ends the connections and the threads. QEMU's migration then fails, and its VM continues. The
    /// migration of a snapshot does not fail: its keeper reads on. That of multifd is over before.
    pub(crate) fn end(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(connection) = self.connection.get() {
            // The thread that records may wait for a disk, and QEMU for that thread. This fails if
            // QEMU has closed its end.
            let _ = connection.shutdown(Shutdown::Both);
        }
        self.stop_recording();
        self.stream = None;
        self.writer = None;
        if self.multifd.is_none() {
            self.keeper = None;
        }
        if let Some(thread) = self.thread.take() {
            // The threads check `stop` every LOOK, unless they wait for a disk.
            let until = Instant::now() + ENDS;
            while !thread.is_finished() && Instant::now() < until {
                thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                let _ = thread.join();
            }
            // Their outcomes own stream and writer.
            while self.outcomes.try_recv().is_ok() {}
        }
        self.dismiss_keeper();
    }
}
