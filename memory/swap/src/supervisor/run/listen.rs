//! The events that the supervisor's loop waits for, and the messages of its server.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{poll, PollFd, PollFlags, Timespec};

use super::{Supervisor, Woken};
use crate::supervisor::error::{failed, SuperviseError};
use crate::supervisor::words;

impl Supervisor<'_> {
    pub(super) fn wait(&self, stop: BorrowedFd<'_>) -> Result<Woken, SuperviseError> {
        let deadlines = self.helpers.iter().map(|helper| helper.deadline);
        let due = self.server.as_ref().and_then(|server| server.deadline);
        let renewal = self.successor.as_ref().and_then(|successor| successor.deadline);
        let again = [self.restart, self.stand_by, self.up_again, self.down_again];
        let deadlines = deadlines.chain(again).chain([due, renewal, Some(self.look)]);
        let timeout = deadlines.flatten().min().and_then(|at| {
            let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            Timespec::try_from(left).ok()
        });
        // `stop` stands in for each descriptor that does not exist.
        let server = self.server.as_ref();
        let pidfd = server.map_or(stop, |server| server.child.pidfd());
        let channel = server.map_or(stop, |server| server.channel.as_fd());
        let resume = self.service.resume().unwrap_or(stop);
        let request = self.service.requests().unwrap_or(stop);
        let successor = self.successor.as_ref();
        let successor_pidfd = successor.map_or(stop, |successor| successor.child.pidfd());
        let successor_channel = successor.map_or(stop, |successor| successor.channel.as_fd());
        let helpers = self.helpers.iter().map(|helper| helper.child.pidfd());
        let one_each = [stop, pidfd, channel, resume, request, successor_pidfd, successor_channel];
        let mut fds: Vec<_> = one_each
            .into_iter()
            .chain(helpers)
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            // There is no memory now: retry.
            Err(rustix::io::Errno::NOMEM | rustix::io::Errno::AGAIN) => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => return Err(failed("wait")(error.into())),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        Ok(Woken {
            stop: ready[0],
            server: server.is_some() && ready[1],
            said: server.is_some() && ready[2],
            resume: self.service.resume().is_some() && ready[3],
            request: self.service.requests().is_some() && ready[4],
            successor: successor.is_some() && (ready[5] || ready[6]),
            helper: ready[one_each.len()..].contains(&true),
        })
    }

    /// Reads the server's messages, line by line.
    pub(super) fn listen(&mut self) -> Result<(), SuperviseError> {
        let Some(server) = &mut self.server else { return Ok(()) };
        let lines = server.lines();
        // A server killed for being late may have reported ready just before.
        let dead = !self.ending && self.server.as_ref().is_some_and(|server| server.killed);
        for line in lines {
            match line.as_str() {
                words::READY if dead => {}
                words::READY => {
                    if let Some(server) = &mut self.server {
                        server.ready = Some(Instant::now());
                        if !self.ending {
                            server.deadline = None;
                        }
                        self.late = 0;
                    }
                    // The disk of a server that was told to end goes, and must not be swapped to.
                    if !self.ending {
                        self.up()?;
                        self.stand_by();
                    }
                }
                words::TRAIN => {
                    self.to_train = self.server.as_mut().and_then(|server| server.sent.take());
                    self.train();
                }
                words::ENOUGH => self.end_training(),
                words::CONNECTED => self.connected(true),
                words::UNCONNECTED => self.connected(false),
                _ => self.service.handle_line(&line),
            }
        }
        Ok(())
    }
}
