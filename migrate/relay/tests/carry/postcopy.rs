//! Postcopy: the preempt channel, the bytes that start the VM (the packaged state), the loss of a
//! link before and after them, and a migration that is recovered after a pause.

use crate::cutter::{Cutter, Plan, Way};
use crate::harness::{
    assert_same, bounded, bounded_by, pages, read_exactly, read_rest, readable, until_in_doubt,
    Options, Receiving, Sending, A_WHILE, PAGE, SHUT_BAD, SHUT_OK, WATCHDOG,
};
use crate::proxy::{Proxy, Tamper};
use crate::resume::SHORT;
use relay::RelayError;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use stream::synth::{Configuration, MainStream, Section};

/// A source that has announced postcopy and sent some RAM, up to the switch to postcopy.
pub(crate) fn announced(ram: usize) -> MainStream {
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

pub(crate) const PING: [u8; 9] = [8, 0, 2, 0, 4, 0, 0, 0, 4];

pub(crate) struct Rig {
    pub(crate) proxy: Proxy,
    pub(crate) sending: Sending,
    pub(crate) receiving: Receiving,
    pub(crate) source: UnixStream,
    pub(crate) listener: std::os::unix::net::UnixListener,
}

pub(crate) fn rig() -> Rig {
    rig_with(Receiving::new())
}

pub(crate) fn rig_with(receiving: Receiving) -> Rig {
    rig_of(receiving, Options::default())
}

fn rig_of(receiving: Receiving, options: Options) -> Rig {
    let listener = receiving.qemu(None);
    let proxy = Proxy::new(receiving.address, Tamper::Nothing);
    let sending = Sending::new(&receiving, proxy.address, options);
    let source = sending.connect();
    Rig { proxy, sending, receiving, source, listener }
}

impl Rig {
    /// Sends `bytes`; the destination QEMU reads them all.
    pub(crate) fn carry(&self, destination: Option<UnixStream>, bytes: &[u8]) -> UnixStream {
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
            // On a busy machine the frozen link may be found silent before the pages have come.
            let come = (0..5).any(|_| pages_come_while_main_is_stuck(links));
            assert!(come, "with {links} links pages wait behind a frozen one in each of five runs");
        }
    });
}

/// Whether the pages that were asked for came in time after the link of everything else froze.
fn pages_come_while_main_is_stuck(links: u16) -> bool {
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
    let stuck =
        std::thread::spawn(move || (&to).write_all(&head).and_then(|()| (&to).write_all(&rest)));
    let (main, _) = listener.accept().unwrap();
    // It carries no byte, and still it is connected.
    let (asked, _) = listener.accept().unwrap();
    assert!(!readable(&asked, A_WHILE));
    assert!(!stuck.is_finished(), "main must be stuck for this to show anything");
    let mut come = true;
    // Few pages after the freeze: they must arrive before the first link is found silent (3 s).
    for nth in 0..20u8 {
        if nth == 10 && links > 1 {
            // The link that carries everything else is stuck too; that of the preempt channel is
            // not.
            proxy.freeze_first();
            asked.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        }
        let page = [&(u64::from(nth) << 12 | 8).to_be_bytes()[..], &[nth; PAGE]].concat();
        let mut got = vec![0; page.len()];
        match (&preempt).write_all(&page).and_then(|()| (&asked).read_exact(&mut got)) {
            Ok(()) => assert_same(&got, &page, "a page that was asked for"),
            // Late, or the session has ended because the first link was found silent.
            Err(error) => {
                assert!(nth >= 10, "page {nth}: {error}");
                come = false;
                break;
            }
        }
    }
    drop((main, asked));
    let _ = stuck.join().unwrap();
    drop((source, preempt));
    sending.result().unwrap_err();
    receiving.result().unwrap_err();
    come
}

#[test]
fn a_link_cut_behind_the_packaged_state_holds_the_source_until_it_is_in_postcopy() {
    bounded(|| {
        let rig = rig();
        let mut main = announced(300);
        main.packaged(&[7; 70_000]);
        let destination = rig.carry(None, &main.take());
        rig.proxy.cut();
        let notice = rig.sending.notices.recv_timeout(WATCHDOG).expect("it is said");
        assert!(notice.contains("Look at the destination"), "{notice}");
        // The source may still fail, and then start its VM: the bytes so far do not show that it
        // cannot.
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
            let silence = session::SILENCE;
            let hears = Receiving::that_hears(Duration::ZERO);
            let rig = rig_of(hears, Options { silence, ..Options::default() });
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
fn a_destination_that_pauses_does_not_show_whether_its_vm_runs() {
    bounded(|| {
        let rig = rig();
        let mut main = announced(300);
        main.packaged(&[7; 70_000]);
        // The destination QEMU closes its socket with its VM running, at a moment when the source
        // could still start its own VM.
        drop(rig.carry(None, &main.take()));
        let notice = rig.sending.notices.recv_timeout(WATCHDOG).expect("it is said");
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
        // RECV_BITMAP and its bitmap, which contains the bytes of SHUT without their meaning.
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
        assert_eq!(end.hidden_downtime, None, "the VM ran before the last bytes came");
        rig.receiving.result().expect("the destination relay succeeds");
    });
}

/// How long the relays wait for a link that will come back.
pub(crate) const RESUME: Duration = Duration::from_secs(120);

/// A network that can be cut; the relays outlive an outage of this length.
pub(crate) struct Outage {
    pub(crate) cutter: Cutter,
    pub(crate) sending: Sending,
    pub(crate) receiving: Receiving,
    pub(crate) listener: std::os::unix::net::UnixListener,
}

pub(crate) fn outage(links: u16, plan: Option<Plan>, resume: [Duration; 2]) -> Outage {
    let receiving = Receiving::resuming(&[None], session::Grants::default(), None, resume[1]);
    let listener = receiving.qemu(None);
    let cutter = Cutter::new(receiving.address, plan);
    let options = Options { links, resume: resume[0], ..Options::default() };
    let sending = Sending::new(&receiving, cutter.address, options);
    Outage { cutter, sending, receiving, listener }
}

/// Page `nth` as a preempt channel carries it.
fn asked_page(nth: u8) -> Vec<u8> {
    [&(u64::from(nth) << 12 | 8).to_be_bytes()[..], &[nth; PAGE]].concat()
}

/// `from` writes the bytes that `to` has to read.
fn passes(mut from: &UnixStream, to: &UnixStream, bytes: &[u8], what: &str) {
    from.write_all(bytes).unwrap();
    assert_same(&read_exactly(to, bytes.len()), bytes, what);
}

#[test]
fn a_link_that_returns_in_postcopy_continues_the_session() {
    bounded(|| {
        for links in [1, 2, 3] {
            let rig = outage(links, None, [RESUME; 2]);
            let (source, preempt) = (rig.sending.connect(), rig.sending.connect());
            let mut main = announced(50);
            let head = main.take();
            (&source).write_all(&head).unwrap();
            let (destination, _) = rig.listener.accept().unwrap();
            assert_same(&read_exactly(&destination, head.len()), &head, "main");
            let (asked, _) = rig.listener.accept().unwrap();
            main.packaged(&[7; 70_000]).raw(&PING).section(Section::Part);
            main.page("pc.ram", 0, &[3; PAGE]);
            passes(&source, &destination, &main.take(), "main");
            passes(&preempt, &asked, &asked_page(1), "a page");

            rig.cutter.hold();
            loop {
                let text = rig.sending.notices.recv_timeout(WATCHDOG).expect("it is said");
                if text.contains("waiting up to") {
                    break;
                }
            }
            (&preempt).write_all(&asked_page(2)).unwrap();
            main.page("pc.ram", PAGE as u64, &[4; PAGE]);
            let rest = main.take();
            (&source).write_all(&rest).unwrap();
            assert!(!readable(&asked, A_WHILE) && !readable(&source, A_WHILE));
            rig.cutter.release();
            assert_same(&read_exactly(&asked, asked_page(2).len()), &asked_page(2), "a page");
            assert_same(&read_exactly(&destination, rest.len()), &rest, "main");
            for nth in 3..40 {
                passes(&preempt, &asked, &asked_page(nth), "a page behind the outage");
            }
            main.end_of_section().section(Section::End).end_of_section().raw(&[0]);
            passes(&source, &destination, &main.take(), "main");
            drop(preempt);
            (&destination).write_all(&SHUT_OK).unwrap();
            assert_eq!(read_exactly(&source, 8), SHUT_OK);
            drop((source, destination, asked));
            rig.sending.result().expect("the source relay succeeds");
            rig.receiving.result().expect("the destination relay succeeds");
        }
    });
}

/// QEMU 8.0.0 to 8.1.1 closes the preempt channel at the end of main, read or not.
#[test]
fn the_end_of_main_does_not_overtake_the_pages_of_the_preempt_channel() {
    for is_gone in [false, true] {
        end_behind_pages(is_gone);
    }
}

/// `is_gone`: the source QEMU ends when it has written everything.
fn end_behind_pages(is_gone: bool) {
    bounded(move || {
        let rig = rig();
        let preempt = rig.sending.connect();
        let mut main = announced(50);
        let destination = rig.carry(None, &main.take());
        let (asked, _) = rig.listener.accept().unwrap();
        main.packaged(&[7; 70_000]).raw(&PING).section(Section::Part);
        main.page("pc.ram", 0, &[3; PAGE]).end_of_section();
        let destination = rig.carry(Some(destination), &main.take());
        // More than the socket of the destination QEMU takes.
        let urgent: Vec<u8> = (0..=u8::MAX).flat_map(asked_page).collect();
        let (to, sent) = (preempt.try_clone().unwrap(), urgent.clone());
        let writer = std::thread::spawn(move || (&to).write_all(&sent).unwrap());
        assert!(readable(&asked, WATCHDOG));
        std::thread::sleep(A_WHILE);
        main.section(Section::End).end_of_section().raw(&[0]);
        let end = main.take();
        (&rig.source).write_all(&end).unwrap();
        if is_gone {
            rig.source.shutdown(Shutdown::Both).unwrap();
        }
        assert!(!readable(&destination, A_WHILE), "the end of main has overtaken pages");
        assert_same(&read_exactly(&asked, urgent.len()), &urgent, "the pages that were asked for");
        writer.join().unwrap();
        assert_same(&read_exactly(&destination, end.len()), &end, "the end of main");
        (&destination).write_all(&SHUT_OK).unwrap();
        if is_gone {
            drop((rig.source, preempt, destination, asked));
            rig.sending.result().expect_err("the source cannot be told");
            return;
        }
        assert_eq!(read_exactly(&rig.source, 8), SHUT_OK);
        drop((rig.source, preempt, destination, asked));
        rig.sending.result().expect("the source relay succeeds");
        rig.receiving.result().expect("the destination relay succeeds");
    });
}

#[test]
fn the_priority_link_of_a_preempt_channel_is_cut_repeatedly() {
    bounded_by(3 * WATCHDOG, || {
        for (links, all) in [(2, false), (3, false), (1, true), (3, true)] {
            let plan = Plan { way: Way::Forth, after: 9, inside: 100, all, times: 12 };
            let rig = outage(links, Some(plan), [RESUME; 2]);
            let (source, preempt) = (rig.sending.connect(), rig.sending.connect());
            let head = announced(1).take();
            (&source).write_all(&head).unwrap();
            let (destination, _) = rig.listener.accept().unwrap();
            assert_same(&read_exactly(&destination, head.len()), &head, "main");
            let (asked, _) = rig.listener.accept().unwrap();
            for nth in 0..150 {
                passes(&preempt, &asked, &asked_page(nth), "a page that was asked for");
            }
            assert!(rig.cutter.cuts() > 5, "{} cuts of {links} links", rig.cutter.cuts());
            drop((source, preempt, destination, asked));
            rig.sending.result().unwrap_err();
            rig.receiving.result().unwrap_err();
        }
    });
}

#[test]
fn the_priority_link_carries_no_frame_of_main() {
    bounded(|| {
        let receiving = Receiving::new();
        let listener = receiving.qemu(None);
        // Slower than the relay, so that the first link has to wait.
        let cutter = Cutter::new(receiving.address, None);
        let options = Options { codec: codec::Codec::Raw, ..Options::default() };
        let sending = Sending::new(&receiving, cutter.address, options);
        let (source, preempt) = (sending.connect(), sending.connect());
        let mut main = announced(1);
        let head = main.take();
        (&source).write_all(&head).unwrap();
        let (destination, _) = listener.accept().unwrap();
        assert_same(&read_exactly(&destination, head.len()), &head, "main");
        let (asked, _) = listener.accept().unwrap();
        // Until another link takes the role, the first one carries these pages, too.
        let first = cutter.carried()[0].link;
        let mut pages_asked = 0_u8;
        let lane = loop {
            passes(&preempt, &asked, &asked_page(pages_asked), "a page");
            pages_asked = pages_asked.wrapping_add(1);
            let carried = cutter.carried();
            let last = carried.iter().rfind(|frame| frame.stream == 1).expect("a page went");
            if last.link != first {
                break last.link;
            }
        };
        main.section(Section::Part);
        for (nth, page) in pages(20_000, 5).iter().enumerate() {
            main.page("pc.ram", (nth * PAGE) as u64, page);
        }
        let bytes = main.take();
        let (to, sent) = (source.try_clone().unwrap(), bytes.clone());
        let writer = std::thread::spawn(move || (&to).write_all(&sent).unwrap());
        assert_same(&read_exactly(&destination, bytes.len()), &bytes, "main");
        writer.join().unwrap();
        passes(&preempt, &asked, &asked_page(pages_asked), "a page");
        let carried = cutter.carried();
        let from = carried.iter().position(|frame| frame.link == lane).expect("a page went");
        let behind = &carried[from..];
        assert!(behind.len() > 40, "{} frames", behind.len());
        let wrong = behind.iter().find(|frame| (frame.link == lane) != (frame.stream == 1));
        assert_eq!(wrong, None, "the lane is link {lane}");
        drop((source, preempt, destination, asked));
        sending.result().unwrap_err();
        receiving.result().unwrap_err();
    });
}

#[test]
fn a_link_that_does_not_return_in_postcopy_lets_both_ends_pause() {
    bounded(|| {
        let rig = outage(2, None, [Duration::from_secs(1); 2]);
        let source = rig.sending.connect();
        let mut main = announced(50);
        main.packaged(&[7; 70_000]).raw(&PING);
        main.section(Section::Part).page("pc.ram", 0, &[3; PAGE]);
        let bytes = main.take();
        (&source).write_all(&bytes).unwrap();
        let (destination, _) = rig.listener.accept().unwrap();
        assert_same(&read_exactly(&destination, bytes.len()), &bytes, "main");
        rig.cutter.hold();
        assert_eq!(read_rest(&source), b"");
        assert_eq!(read_rest(&destination), b"");
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::Paused { .. }), "{error}");
        rig.receiving.result().unwrap_err();
    });
}

#[test]
fn a_packaged_state_that_was_never_sent_is_not_reported_as_a_pause() {
    bounded(|| {
        let rig = outage(1, None, [RESUME, Duration::from_secs(1)]);
        let source = rig.sending.connect();
        let mut main = announced(50);
        let head = main.take();
        (&source).write_all(&head).unwrap();
        let (destination, _) = rig.listener.accept().unwrap();
        assert_same(&read_exactly(&destination, head.len()), &head, "main");
        rig.cutter.hold();
        main.packaged(&[7; 7000]).raw(&PING);
        main.section(Section::Part).page("pc.ram", 0, &[3; PAGE]);
        (&source).write_all(&main.take()).unwrap();
        // Until the relay has read the source over into postcopy.
        until_in_doubt(&rig.sending);
        // The receiver gives up, and reports that once it can be reached again.
        rig.receiving.result().unwrap_err();
        assert_eq!(read_rest(&destination), b"", "what starts the VM was delivered");
        rig.cutter.release();
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::Stranded { .. }), "{error}");
        assert_eq!(read_rest(&source), b"");
    });
}

#[test]
fn an_interrupt_in_postcopy_waits_for_a_second_and_lets_both_ends_pause() {
    bounded(|| {
        let rig = rig();
        let mut main = announced(3);
        // In one chunk with the bytes behind it: STILL_OPEN is not needed, and not sent.
        main.packaged(&[7; 30_000]).raw(&PING);
        main.section(Section::Part).page("pc.ram", 0, &[3; PAGE]);
        let destination = rig.carry(None, &main.take());
        assert!(rig.sending.handle.in_doubt(), "a migrate_cancel would start the source VM");
        rig.sending.handle.stop();
        let notice = rig.sending.notices.recv_timeout(WATCHDOG).expect("it is said");
        assert!(notice.contains("has the VM"), "{notice}");
        assert!(!readable(&rig.source, A_WHILE), "QEMU's socket was closed");
        rig.sending.handle.stop();
        assert_eq!(read_rest(&rig.source), b"");
        assert_eq!(read_rest(&destination), b"");
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::Paused { .. }), "{error}");
        rig.receiving.result().unwrap_err();
    });
}

/// QEMU turns to postcopy between the look at its status and the cancel. Below 10.0 it obeys all
/// the same, and from 8.2 on runs its VM again; from 10.0 on it refuses, and has given its VM away.
#[test]
fn a_source_that_turns_to_postcopy_while_it_is_told_to_cancel_gives_its_vm_away_if_it_refuses() {
    bounded(|| {
        for refuses in [false, true] {
            let rig = rig();
            let mut main = announced(3);
            let destination = rig.carry(None, &main.take());
            assert!(rig.sending.handle.forbid_commit());
            main.packaged(&[7; 30_000]).raw(&PING);
            main.section(Section::Part).page("pc.ram", 0, &[3; PAGE]);
            let rest = main.take();
            (&rig.source).write_all(&rest).unwrap();
            if refuses {
                rig.sending.handle.allow_commit();
                assert_same(&read_exactly(&destination, rest.len()), &rest, "main");
                assert!(rig.sending.handle.in_doubt());
            }
            rig.source.shutdown(Shutdown::Both).unwrap();
            let got = read_rest(&destination);
            assert!(got.len() < 30_000, "what starts the VM was delivered");
            let error = rig.sending.result().unwrap_err();
            assert_eq!(error.to_string().contains("to cancel"), !refuses, "{error}");
            rig.receiving.result().unwrap_err();
        }
    });
}

#[test]
fn a_link_lost_in_the_packaged_state_frees_the_source_before_it_goes_over() {
    bounded(|| {
        let rig = outage(1, None, [SHORT; 2]);
        let source = rig.sending.connect();
        let mut main = announced(3);
        let head = main.take();
        main.packaged(&vec![7; 8 << 20]).raw(&PING);
        main.section(Section::Part).page("pc.ram", 0, &[3; PAGE]);
        let rest = main.take();
        let to = source.try_clone().unwrap();
        let writer = std::thread::spawn(move || {
            (&to).write_all(&head).unwrap();
            rest.chunks(16 << 10).all(|piece| (&to).write_all(piece).is_ok())
        });
        let (destination, _) = rig.listener.accept().unwrap();
        // A part is delivered, STILL_OPEN was sent, and then the network fails.
        let _ = read_exactly(&destination, 1 << 20);
        rig.cutter.hold();
        assert!(!writer.join().unwrap(), "the relay read the source over into postcopy");
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::Ended(_)), "{error}");
        rig.receiving.result().unwrap_err();
    });
}

/// The source QEMU then stays in postcopy-paused, and does not run the VM.
#[test]
fn a_refusal_in_postcopy_is_not_reported_as_a_running_source_vm() {
    bounded(|| {
        let rig = rig();
        let mut main = announced(3);
        main.packaged(&[7; 30_000]).raw(&PING);
        main.section(Section::Part).page("pc.ram", 0, &[3; PAGE]);
        let destination = rig.carry(None, &main.take());
        (&destination).write_all(&SHUT_BAD).unwrap();
        drop(destination);
        assert_eq!(read_exactly(&rig.source, 8), SHUT_BAD);
        drop(rig.source);
        let error = rig.sending.result().unwrap_err();
        assert!(matches!(error, RelayError::PostcopyRefused { code: 1 }), "{error}");
        rig.receiving.result().unwrap_err();
    });
}
