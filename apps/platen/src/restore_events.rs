//! The events of a player. VMs need their pages even if `restore` is stopped and reads no event.

use anyhow::Context;
use host::Channel;
use rustix::event::{poll, PollFd, PollFlags};
use serde_json::Value;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

/// Sends events to `restore`. A thread sends those for which the socket has no room. Each command
/// of `restore` causes a few events, which bounds their number.
pub(crate) struct Events {
    shared: Arc<Shared>,
    sender: JoinHandle<()>,
}

struct Shared {
    channel: Arc<Channel>,
    late: Mutex<Late>,
    changed: Condvar,
}

/// Events that are still to be sent. The first one is removed after it was sent.
#[derive(Default)]
struct Late {
    events: VecDeque<Value>,
    is_over: bool,
}

impl Events {
    pub(crate) fn begin(channel: Arc<Channel>) -> anyhow::Result<Self> {
        let (late, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { channel, late, changed });
        let here = Arc::clone(&shared);
        let sender = Builder::new().name("events".into()).spawn(move || here.send_late());
        Ok(Self { sender: sender.context("cannot start a thread")?, shared })
    }

    /// Sends an event. If there is room, the event is sent at once and arrives even if this process
    /// is killed.
    pub(crate) fn tell(&self, event: Value) {
        let mut late = self.shared.late();
        if !late.events.is_empty() || !self.shared.is_sent(&event) {
            late.events.push_back(event);
            self.shared.changed.notify_all();
        }
    }

    /// Sends an event that must come before everything that follows. Waits until there is room.
    pub(crate) fn tell_first(&self, event: &Value) {
        while !self.shared.is_sent(event) {
            self.shared.wait_for_room();
        }
    }

    /// Waits until all events are sent.
    pub(crate) fn end(self) {
        self.shared.late().is_over = true;
        self.shared.changed.notify_all();
        let _ = self.sender.join();
    }
}

impl Shared {
    fn late(&self) -> MutexGuard<'_, Late> {
        self.late.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns false if there is no room. An event to a `restore` that has died counts as sent.
    fn is_sent(&self, event: &Value) -> bool {
        let sent = self.channel.send(event, None);
        !sent.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    }

    fn wait_for_room(&self) {
        // An error shows in the next attempt.
        let _ = poll(&mut [PollFd::new(&*self.channel, PollFlags::OUT)], None);
    }

    /// Sends the late events. This is the body of a thread.
    fn send_late(&self) {
        let mut late = self.late();
        loop {
            match late.events.front().map(|event| self.is_sent(event)) {
                Some(true) => {
                    late.events.pop_front();
                }
                Some(false) => {
                    drop(late);
                    self.wait_for_room();
                    late = self.late();
                }
                None if late.is_over => return,
                None => late = self.changed.wait(late).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// As while `restore` is stopped. The socket has room for few of these events, whatever the
    /// system's default is.
    #[test]
    fn events_that_nobody_reads_delay_no_vm_and_arrive_in_order_later() {
        const EVENTS: u64 = 2000;
        let (ours, theirs) = Channel::pair().unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&theirs, 8 << 10).unwrap();
        let events = Events::begin(Arc::new(Channel::from(theirs))).unwrap();
        for nth in 0..EVENTS {
            events.tell(json!({ "vm": nth }));
        }
        assert!(!events.shared.late().events.is_empty(), "the socket has taken all of them");
        let read = std::thread::spawn(move || {
            for nth in 0..EVENTS {
                let (event, _) = ours.receive::<Value>().unwrap().unwrap();
                assert_eq!(event["vm"], nth);
            }
            assert!(ours.receive::<Value>().unwrap().is_none());
        });
        events.end();
        read.join().unwrap();
    }

    #[test]
    fn events_after_the_end_of_restore_are_dropped() {
        let (ours, theirs) = Channel::pair().unwrap();
        let events = Events::begin(Arc::new(Channel::from(theirs))).unwrap();
        for nth in 0..2000 {
            events.tell(json!({ "vm": nth }));
        }
        drop(ours);
        events.tell_first(&json!({ "vm": 0 }));
        events.end();
    }
}
