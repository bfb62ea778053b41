//! Finds the kinds of the connections that wait at a door.

use super::{Doorkeeper, Gate};
use crate::awaits::Awaits;
use crate::entrance::{has_ended, reset, OTHER_WAY};
use relay::QemuSocket;
use rustix::net::{recv, RecvFlags};
use std::time::{Duration, Instant};
use stream::Kind;

/// Longest time for which a connection's kind may stay unknown: a multifd channel may come before
/// its migration.
pub(super) const UNDECIDED: Duration = Duration::from_secs(10);
/// A connection that is silent for this long makes the service ask the other host what awaits it
/// there. Most migrations have written by then. An NBD server writes first. Its client waits for
/// that, and a VM may wait for the client.
const ASK: Duration = Duration::from_millis(100);
/// Why a multifd channel is refused that waits without its migration.
const NO_MAIN: &str = "a multifd channel whose migration did not begin within";

/// Kind of a waiting connection.
#[derive(Debug, PartialEq, Eq)]
enum Look {
    Migration,
    /// A multifd channel: its main connection is still silent, or has not come.
    Channel,
    /// Too few bytes.
    Undecided,
    Silent,
    Stranger(String),
    Gone,
}

impl Gate {
    /// Finds the kinds of the waiting connections.
    pub(super) fn sort(&mut self, lent: bool, keeper: &mut impl Doorkeeper) {
        let mut at = 0;
        while at < self.waiting.len() {
            let one = &mut self.waiting[at];
            // Before the look: what comes while this thread stands still behind it is no silence.
            let so_long = one.since.elapsed();
            let unanswered = one.first_asked.map_or(Duration::ZERO, |at| at.elapsed());
            match look(&one.socket) {
                // Two carriers at one listening socket would take each other's connections.
                Look::Migration if lent => {
                    reset(self.waiting.remove(at).socket);
                    keeper.refused(&self.door, OTHER_WAY);
                }
                Look::Migration => {
                    let Some(listener) = &self.listener else { return };
                    // Connections with another destination are another VM's.
                    let wanted = one.wanted;
                    // A source opens its channels behind its main connection. A channel that came
                    // before it and has ended was left by a migration that was cancelled.
                    let mut nth = 0..;
                    self.waiting.retain(|other| {
                        let came_before = nth.next() < Some(at);
                        !(came_before && other.wanted == wanted && has_ended(&other.socket))
                    });
                    let all = self.waiting.extract_if(.., |other| other.wanted == wanted);
                    let all = all.map(|one| one.socket).collect();
                    keeper.migration(&self.door, listener, all);
                    return;
                }
                Look::Stranger(why) => {
                    keeper.stranger(&self.door, self.waiting.remove(at).socket, &why);
                }
                Look::Gone => drop(self.waiting.remove(at)),
                found => {
                    let spoke = found != Look::Silent;
                    if so_long >= ASK {
                        one.first_asked.get_or_insert_with(Instant::now);
                        let answer = keeper.awaits(&self.door, &one.socket, one.since);
                        one.asked = answer.is_none();
                        one.awaited = answer.or(one.awaited);
                    }
                    one.spoke = spoke;
                    // This thread may have stood still: then the other host is only being asked,
                    // and the main connection of a channel may just have come.
                    let is_client = one.awaited == Some(Awaits::Clients);
                    let waited = if one.awaited.is_none() { unanswered } else { so_long };
                    let is_over = so_long >= if spoke { UNDECIDED } else { ASK }
                        && waited >= Awaits::patience(one.awaited);
                    match is_over && (is_client || !self.begins_with(at)) {
                        false => at += 1,
                        // A stranger may be forwarded. This one has pages of a VM, and no QEMU
                        // there would know whose they are.
                        true if found == Look::Channel => {
                            reset(self.waiting.remove(at).socket);
                            let why = format!("{NO_MAIN} {} s", so_long.as_secs());
                            keeper.refused(&self.door, &why);
                        }
                        true if spoke => {
                            let why = format!("it began no migration in {} s", so_long.as_secs());
                            keeper.stranger(&self.door, self.waiting.remove(at).socket, &why);
                        }
                        true => keeper.silent(&self.door, self.waiting.remove(at).socket),
                    }
                }
            }
        }
    }

    /// Whether the migration to which this connection would belong begins with another one.
    fn begins_with(&self, at: usize) -> bool {
        let wanted = self.waiting[at].wanted;
        let mut others = self.waiting.iter().filter(|other| other.wanted == wanted);
        others.any(|other| look(&other.socket) == Look::Migration)
    }
}

fn look(socket: &QemuSocket) -> Look {
    let mut first = [0; 8];
    let got = match recv(socket, &mut first[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, 0)) => return Look::Gone,
        Ok((_, got)) => got,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Look::Silent,
        Err(_) => return Look::Gone,
    };
    match stream::classify(&first[..got]) {
        None => Look::Undecided,
        Some(Kind::Multifd) => Look::Channel,
        Some(Kind::Main | Kind::Recovery) => Look::Migration,
        Some(_) if first.starts_with(&[0x16, 0x03]) => Look::Stranger(
            "it begins with TLS: turn TLS off in libvirt (platen secures the links between the \
             hosts itself)"
                .into(),
        ),
        Some(_) => Look::Stranger(format!("it begins with {:02x?}", &first[..got])),
    }
}
