//! Postcopy: the preempt channel, what starts the VM (the packaged state), what a lost link means before and after it,
//! and a migration that goes on after a pause.

use crate::harness::{
    assert_same, bounded, pages, read_exactly, read_rest, readable, Options, Receiving, Sending,
    A_WHILE, PAGE, SHUT_OK,
};
use crate::proxy::{Proxy, Tamper};
use relay::RelayError;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use stream::synth::{Configuration, MainStream, Section};

/// A source that has announced postcopy and sent some RAM, up to where it turns to postcopy.
fn announced(ram: usize) -> MainStream {
    let mut main = MainStream::new(PAGE);
    let configuration = Configuration { machine: "pc-q35-10.0", ..Configuration::default() };
    main.file_header().configuration(&configuration).command(1, &[]).command(2, &[0, 0, 0, 1]);
    main.advise_postcopy(PAGE as u64);
    main.section(Section::Start).block_table(&[("pc.ram", 1 << 30)]).end_of_section();
    main.section(Section::Part);
    for (nth, page) in pages(ram, 5).iter().enumerate() {
        main.page("pc.ram", (nth * PAGE) as u64, page);
    }
    main.end_of_section();
    main
}

const PING: [u8; 9] = [8, 0, 2, 0, 4, 0, 0, 0, 4];

struct Rig {
    proxy: Proxy,
    sending: Sending,
    receiving: Receiving,
    source: UnixStream,
    listener: std::os::unix::net::UnixListener,
}

fn rig() -> Rig {
    let receiving = Receiving::new();
    let listener = receiving.qemu(None);
    let proxy = Proxy::new(receiving.address, Tamper::Nothing);
    let sending = Sending::new(&receiving, proxy.address, Options::default());
    let source = sending.connect();
    Rig { proxy, sending, receiving, source, listener }
}

impl Rig {
    /// Sends `bytes`, all of which the destination QEMU reads.
    fn carry(&self, destination: Option<UnixStream>, bytes: &[u8]) -> UnixStream {
        let (to, sent) = (self.source.try_clone().unwrap(), bytes.to_vec());
        let writer = std::thread::spawn(move || (&to).write_all(&sent).unwrap());
        let destination = destination.unwrap_or_else(|| self.listener.accept().unwrap().0);
        assert_same(&read_exactly(&destination, bytes.len()), bytes, "main");
        writer.join().unwrap();
        destination
    }
}

#[test]
fn a_silent_connection_reaches_qemu_and_its_pages_come_while_main_is_stuck() {
    bounded(|| {
        for links in [1, 2, 4] {
            let receiving = Receiving::new();
            let listener = receiving.qemu(None);
            let options = Options { links, ..Options::default() };
            let proxy = Proxy::new(receiving.address, Tamper::Nothing);
            let sending = Sending::new(&receiving, proxy.address, options);
            let (source, preempt) = (sending.connect(), sending.connect());
            let mut main = announced(2000);
            let head = main.take();
            // Far more than all sockets and buffers between the relays hold.
            let rest = pages(30_000, 7).concat();
            let to = source.try_clone().unwrap();
            let stuck = std::thread::spawn(move || {
                (&to).write_all(&head).and_then(|()| (&to).write_all(&rest))
            });
            let (main, _) = listener.accept().unwrap();
            // Not one byte is in it, and still it is there.
            let (asked, _) = listener.accept().unwrap();
            assert!(!readable(&asked, A_WHILE));
            assert!(!stuck.is_finished(), "main must be stuck for this to show anything");
            for nth in 0..50u8 {
                if nth == 10 && links > 1 {
                    // The link that carries everything else is stuck, too: its own is not.
                    proxy.freeze_first();
                }
                let page = [&(u64::from(nth) << 12 | 8).to_be_bytes()[..], &[nth; PAGE]].concat();
                (&preempt).write_all(&page).unwrap();
                assert_same(&read_exactly(&asked, page.len()), &page, "a page that was asked for");
            }
            drop((main, asked));
            let _ = stuck.join().unwrap();
            drop((source, preempt));
            sending.result().unwrap_err();
            receiving.result().unwrap_err();
        }
    });
}

#[test]
fn a_link_cut_behind_the_packaged_state_holds_the_source_until_it_is_in_postcopy() {
    bounded(|| {
        let rig = rig();
        let mut main = announced(300);
        main.packaged(&[7; 70_000]);
        let destination = rig.carry(None, &main.take());
        rig.proxy.cut();
        let notice = rig.sending.notices.recv_timeout(Duration::from_secs(20)).expect("it is said");
        assert!(notice.contains("Look at the destination"), "{notice}");
        // The source may still fail, and then start its VM: what it writes does not yet say that it cannot.
        (&rig.source).write_all(&PING).unwrap();
        assert!(!readable(&rig.source, 3 * A_WHILE), "QEMU's socket was closed");
        (&rig.source).write_all(&[2]).unwrap();
        assert_eq!(read_rest(&rig.source), b"", "in postcopy it has to pause");
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::Paused { .. }), "{error}");
        drop(destination);
        rig.receiving.result().unwrap_err();
    });
}

#[test]
fn a_link_lost_in_postcopy_lets_both_ends_pause() {
    bounded(|| {
        for harm in [Proxy::cut, Proxy::freeze] {
            let rig = rig();
            let mut main = announced(300);
            main.packaged(&[7; 70_000]).raw(&PING);
            main.section(Section::Part).page("pc.ram", 0, &[3; PAGE]);
            let destination = rig.carry(None, &main.take());
            harm(&rig.proxy);
            assert_eq!(read_rest(&rig.source), b"");
            assert_eq!(read_rest(&destination), b"");
            let error = rig.sending.result().unwrap_err();
            assert!(error.to_string().contains("migrate-recover"), "{error}");
            rig.receiving.result().unwrap_err();
        }
    });
}

#[test]
fn a_destination_that_pauses_says_nothing_of_its_vm() {
    bounded(|| {
        let rig = rig();
        let mut main = announced(300);
        main.packaged(&[7; 70_000]);
        // It closes its socket with its VM running, at a moment when the source could still start its own.
        drop(rig.carry(None, &main.take()));
        let notice = rig.sending.notices.recv_timeout(Duration::from_secs(20)).expect("it is said");
        assert!(notice.contains("Look at the destination"), "{notice}");
        assert!(!readable(&rig.source, A_WHILE), "QEMU's socket was closed");
        drop(rig.source);
        rig.sending.result().unwrap_err();
        rig.receiving.result().unwrap_err();
    });
}

#[test]
fn a_migration_goes_on_through_new_relays() {
    bounded(|| {
        let rig = rig();
        let mut main = MainStream::new(PAGE);
        main.command(10, b"\x06pc.ram");
        let destination = rig.carry(None, &main.take());
        // RECV_BITMAP and its bitmap, in which SHUT stands where it means nothing.
        let frame = [0, 5, 0, 7, 6, b'p', b'c', b'.', b'r', b'a', b'm'];
        let end = 0x0123_4567_89ab_cdef_u64.to_be_bytes();
        let answer = [&frame[..], &16u64.to_be_bytes(), &SHUT_OK, &SHUT_OK, &end].concat();
        (&destination).write_all(&answer).unwrap();
        assert_same(&read_exactly(&rig.source, answer.len()), &answer, "the bitmap");

        main.command(9, &[]).section(Section::Part);
        for (nth, page) in pages(700, 9).iter().enumerate() {
            main.page("pc.ram", (nth * PAGE) as u64, page);
        }
        main.end_of_section().section(Section::End).end_of_section().raw(&[0]);
        let destination = rig.carry(Some(destination), &main.take());
        (&destination).write_all(&SHUT_OK).unwrap();
        assert_eq!(read_exactly(&rig.source, 8), SHUT_OK);
        drop((rig.source, destination));
        let end = rig.sending.result().expect("the source relay succeeds");
        assert!(end.return_path);
        rig.receiving.result().expect("the destination relay succeeds");
    });
}
