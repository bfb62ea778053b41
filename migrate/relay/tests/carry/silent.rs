//! W19: a connection that is silent is the preempt channel only once every multifd channel has
//! written, however long the source's threads take.

use crate::harness::{
    assert_same, bounded, read_exactly, readable, Options, Receiving, Sending, A_WHILE, PAGE,
};
use rustix::event::{poll, PollFd, PollFlags, Timespec};
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;
use stream::synth::{ChannelStream, Configuration, MainStream, Section, Style};

/// Several times the silence of a preempt channel.
const LONG: Duration = Duration::from_millis(500);

/// Whether a connection waits at `listener` within `wait`.
fn connects(listener: &UnixListener, wait: Duration) -> bool {
    let wait = Timespec { tv_sec: 0, tv_nsec: i64::from(wait.subsec_nanos()) };
    poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&wait)).unwrap() > 0
}

/// `from` writes the bytes that `to` has to read.
fn passes(mut from: &UnixStream, to: &UnixStream, bytes: &[u8], what: &str) {
    from.write_all(bytes).unwrap();
    assert_same(&read_exactly(to, bytes.len()), bytes, what);
}

/// A multifd migration with postcopy (QEMU 10.1 and later) whose only channel has a slow thread.
#[test]
fn a_multifd_channel_that_writes_late_is_no_preempt_channel() {
    bounded(|| {
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        let sending = Sending::new(&receiving, receiving.address, Options::default());
        let mut main = MainStream::new(PAGE);
        let configuration = Configuration { machine: "pc-q35-10.1", ..Configuration::default() };
        main.file_header().configuration(&configuration).command(1, &[]).command(2, &[0, 0, 0, 1]);
        main.advise_postcopy(PAGE as u64);
        main.section(Section::Start).block_table(&[("pc.ram", 1 << 30)]);
        let source = sending.connect();
        let head = main.take();
        (&source).write_all(&head).unwrap();
        let (destination, _) = listener.accept().unwrap();
        assert_same(&read_exactly(&destination, head.len()), &head, "main");

        // The main stream has announced postcopy, and this thread does not run yet.
        let channel = sending.connect();
        assert!(!connects(&listener, LONG), "it was taken for the preempt channel");

        let mut packets = ChannelStream::new(Style::Qemu92, PAGE, 0);
        let init = packets.take();
        (&channel).write_all(&init).unwrap();
        let (carried, _) = listener.accept().unwrap();
        assert_same(&read_exactly(&carried, init.len()), &init, "the channel's first bytes");
        // It counts as a multifd channel: the marker waits for its SYNC (W18).
        let marker = main.flush_marker().end_of_section().take();
        (&source).write_all(&marker).unwrap();
        assert!(!readable(&destination, A_WHILE), "the marker has overtaken the SYNC");
        passes(&channel, &carried, &packets.sync(0).take(), "SYNC");
        assert_same(&read_exactly(&destination, marker.len()), &marker, "the marker");

        // All channels have written. One that is silent now is the preempt channel.
        let asked = sending.connect();
        let (preempt, _) = listener.accept().unwrap();
        let page = [&8_u64.to_be_bytes()[..], &[7; PAGE]].concat();
        passes(&asked, &preempt, &page, "a page that was asked for");

        drop((source, channel, asked));
        sending.result().unwrap_err();
        receiving.result().unwrap_err();
    });
}
