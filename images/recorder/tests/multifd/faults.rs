//! Defective migrations: none is recorded, and none waits for ever.

use super::*;

/// The error of a refused migration, with all causes.
fn refusal(main: &[u8], lanes: &[Vec<u8>]) -> String {
    let error = recorded(main, lanes).0.expect_err("the migration is recorded");
    let mut said = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        said = format!("{said}: {error}");
        cause = error.source();
    }
    said
}

#[test]
fn a_migration_that_lacks_the_rest_of_a_connection_is_refused() {
    for style in STYLES {
        let (main, lanes) = multifd_streams(style, PAGE, 2, pages(12, PAGE));
        for (which, whole) in [&main].into_iter().chain(&lanes).enumerate() {
            for len in (0..whole.len()).rev().step_by(97) {
                let (mut main, mut lanes) = (main.clone(), lanes.clone());
                match which {
                    0 => main.truncate(len),
                    lane => lanes[lane - 1].truncate(len),
                }
                let said = refusal(&main, &lanes);
                assert!(said.contains("ends at byte"), "{style:?} {which} {len}: {said}");
            }
        }
    }
}

#[test]
fn a_migration_without_one_of_its_channels_waits_until_it_is_abandoned() {
    let (main, lanes) = multifd_streams(Style::Qemu92, PAGE, 2, pages(12, PAGE));
    let multifd = Multifd::new(2, Memory::default());
    let (sender, outcomes) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| multifd.channel(&lanes[0][..]));
        scope.spawn(|| sender.send(multifd.main(&main[..], Ending::Closed).map(|_| ())));
        assert!(outcomes.recv_timeout(Duration::from_millis(100)).is_err());
        assert!(!multifd.is_over());
        multifd.abandon(io::Error::other("no second channel"));
        let error = outcomes.recv().unwrap().unwrap_err();
        assert!(
            matches!(error, RecordError::Io { source, .. } if source.to_string() == "no second channel")
        );
    });
    assert!(multifd.has_failed());
}

#[test]
fn packets_that_a_save_must_not_have_are_refused_with_a_remedy() {
    let said = |edit: &dyn Fn(&mut ChannelStream)| {
        let mut history = History::new(Style::Qemu92, 2, 4);
        edit(&mut history.lanes[1]);
        history.part(&[(1, 0, 1)]);
        let (main, lanes, _) = history.finish();
        refusal(&main, &lanes)
    };
    let method = |flags: u32, payload: &'static [u8]| {
        said(&move |lane| {
            lane.compressed(9, flags, "pc.ram", &[0], payload);
        })
    };
    let page = |block: &'static str, address: u64| {
        said(&move |lane| {
            lane.packet(9, block, &[(address, Some(&[1; PAGE]))], false);
        })
    };
    let device = said(&|lane| {
        lane.device_state("vfio", 0, b"x");
    });
    for (said, expected) in [
        (method(2, b"x"), "set it to none"),
        (method(4, b"x"), "multifd channel 1: "),
        (method(0, b"x"), "a packet with 1 pages in 1 bytes"),
        (method(0x80, &[1; PAGE]), "flags 0x80"),
        (device, "VFIO"),
        (page("vga", 0), "block 'vga', which is not in the block table"),
        (page("pc.ram", 4 << 12), "page 0x4000 of block 'pc.ram' of 16384 bytes"),
        (page("pc.ram", 100), "page 0x64 of block"),
    ] {
        assert!(said.contains(expected), "{said}");
    }
}

#[test]
fn channels_that_do_not_belong_together_are_refused() {
    let pages = pages(4, PAGE);
    let (main, lanes) = multifd_streams(Style::Qemu92, PAGE, 2, &pages);
    let twice = refusal(&main, &[lanes[0].clone(), lanes[0].clone()]);
    assert!(twice.contains("channel 0 is there already"), "{twice}");
    let mut other = lanes[1].clone();
    other[8] ^= 1;
    let other = refusal(&main, &[lanes[0].clone(), other]);
    assert!(other.contains("of another VM"), "{other}");
    let (_, three) = multifd_streams(Style::Qemu92, PAGE, 3, &pages);
    let third = refusal(&main, &[lanes[0].clone(), three[2].clone()]);
    assert!(third.contains("channel 2, where the migration has 2"), "{third}");
    let no_channel = refusal(&main, &[lanes[0].clone(), main.clone()]);
    assert!(no_channel.contains("does not begin as a multifd channel"), "{no_channel}");
}

#[test]
fn ram_that_ends_without_a_barrier_or_goes_on_behind_it_is_refused() {
    let history = || {
        let mut history = History::new(Style::Qemu92, 1, 4);
        history.part(&[(1, 0, 1)]);
        history
    };
    let mut without = history();
    without.main.section(Section::End).end_of_section().device_tail(400);
    let (main, lane) = (without.main.take(), without.lanes[0].take());
    assert!(refusal(&main, &[lane]).contains("end of RAM without a barrier"));

    let mut behind = history();
    behind.main.section(Section::End);
    behind.barrier();
    behind.main.zero("pc.ram", 0).end_of_section().device_tail(400);
    let (main, lane) = (behind.main.take(), behind.lanes[0].take());
    assert!(refusal(&main, &[lane]).contains("end of RAM without a barrier"));

    let mut mixed = history();
    mixed.style = Style::Qemu72;
    mixed.part(&[(1, 0, 2)]);
    let (main, lanes, _) = mixed.finish();
    // The end of this section is no barrier, and its SYNC is one too many.
    assert!(refusal(&main, &lanes).contains("end of RAM without a barrier"));
    let mut mixed = History::new(Style::Qemu72, 1, 4);
    mixed.style = Style::Qemu92;
    mixed.part(&[(1, 0, 2)]);
    let (main, lanes, _) = mixed.finish();
    assert!(refusal(&main, &lanes).contains("two kinds of barriers"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    /// A corrupted channel is recorded or refused; it causes no panic and no wait without end.
    #[test]
    fn bent_channels_are_recorded_or_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)
    ) {
        let (main, mut lanes) = multifd_streams(Style::Qemu92, PAGE, 2, pages(20, PAGE));
        for (at, byte) in changes {
            let lane = at.index(lanes.len());
            let at = at.index(lanes[lane].len());
            lanes[lane][at] = byte;
        }
        let _ = recorded(&main, &lanes);
    }
}

/// QEMU closes its channels once it is told to: nothing but their end may follow.
#[test]
fn pages_behind_the_recorded_migration_are_noticed() {
    let (main, lanes) = multifd_streams(Style::Qemu92, PAGE, 1, pages(4, PAGE));
    let mut more = ChannelStream::new(Style::Qemu92, PAGE, 0);
    more.take();
    let pages = more.packet(99, "pc.ram", &[(0, None)], false).take();
    let sync = more.sync(99).take();
    let empty = ChannelStream::new(Style::Qemu72, PAGE, 0).empty(99).take().split_off(64);
    for (behind, is_late) in
        [(&b""[..], false), (&empty, false), (&pages, true), (&sync, true), (&pages[..50], true)]
    {
        let (waits, go) = Gate::new();
        let multifd = Multifd::new(1, Memory::default());
        thread::scope(|scope| {
            let lane = scope.spawn(|| multifd.channel((&lanes[0][..]).chain(waits).chain(behind)));
            multifd.main(&main[..], Ending::Described).unwrap();
            assert!(multifd.is_over() && !multifd.has_late_pages());
            drop(go);
            lane.join().unwrap();
        });
        assert_eq!(multifd.has_late_pages(), is_late, "{} bytes", behind.len());
    }
}

/// A part of a connection without bytes, which ends when the sender is dropped.
struct Gate(mpsc::Receiver<()>);

impl Gate {
    fn new() -> (Self, mpsc::Sender<()>) {
        let (sender, receiver) = mpsc::channel();
        (Self(receiver), sender)
    }
}

impl Read for Gate {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        assert!(self.0.recv().is_err(), "only dropped");
        Ok(0)
    }
}

/// An error of the sink ends the recording, whichever connection has the page.
#[test]
fn an_error_of_the_sink_is_returned() {
    struct Full(u64);
    impl Sink for Full {
        type Error = io::Error;
        fn blocks(&mut self, _: usize, _: &[RamBlock]) -> io::Result<()> {
            Ok(())
        }
        fn page(&mut self, _: usize, page: u64, _: &[u8]) -> io::Result<()> {
            if page < self.0 {
                Ok(())
            } else {
                Err(io::ErrorKind::StorageFull.into())
            }
        }
        fn zero(&mut self, _: usize, _: u64) -> io::Result<()> {
            Ok(())
        }
    }
    let (main, lanes) = multifd_streams(Style::Qemu92, PAGE, 1, pages(400, PAGE));
    let multifd = Multifd::new(1, Full(300));
    let error = thread::scope(|scope| {
        scope.spawn(|| multifd.channel(&lanes[0][..]));
        multifd.main(&main[..], Ending::Closed).err().unwrap()
    });
    let is_full = |error: &io::Error| error.kind() == io::ErrorKind::StorageFull;
    assert!(matches!(&error, RecordError::Sink(error) if is_full(error)), "{error}");
}
