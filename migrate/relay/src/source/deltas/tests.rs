//! Which pages are stored, looked up and sent as differences.

use super::*;
use crate::auto::AutoConfig;
use crate::source::test_session::{receiver, with_session, PAGE};
use delta::Counts;
use session::FrameType;
use std::ops::Range;
use std::time::Duration;
use stream::synth::{ChannelStream, Configuration, MainStream, Section, Style};

const BLOCK: &str = "pc.ram";
const SIZE: usize = PAGE as usize;

/// Page `number` in this version: versions differ in one byte.
fn page(number: u8, version: u8) -> [u8; SIZE] {
    let mut page = [number; SIZE];
    page[77] = version;
    page
}

/// The pages in this version, with their addresses.
fn pages(numbers: Range<u8>, version: u8) -> Vec<(u64, [u8; SIZE])> {
    let address = |number: u8| u64::from(number) * u64::from(PAGE);
    numbers.map(|number| (address(number), page(number, version))).collect()
}

/// A QEMU that sends pages, and the sender of their differences.
struct Stream {
    main: MainStream,
    /// The channel, and the SYNCs before the next chunk.
    channel: Option<(ChannelStream, u64)>,
    tokeniser: Tokeniser,
    deltas: Deltas,
}

impl Stream {
    /// A single stream, or one multifd channel.
    fn new(shared: &Shared, kind: Kind) -> Self {
        let mut main = MainStream::new(SIZE);
        main.file_header();
        main.configuration(&Configuration { machine: "pc", ..Configuration::default() });
        main.section(Section::Start).block_table(&[(BLOCK, 256 * u64::from(PAGE))]);
        main.page(BLOCK, 0, &page(0, 0)).end_of_section();
        let mut tokeniser = Tokeniser::new(Kind::Main, SIZE);
        tokeniser.feed(&main.take(), &mut Vec::new());
        let mut channel = None;
        if kind == Kind::Multifd {
            shared.channel_deltas.begin(1, SIZE, tokeniser.block_table());
            let open = shared.channel_deltas.open().expect("it has begun");
            tokeniser = Tokeniser::new(kind, SIZE);
            // The first chunk has no addresses otherwise.
            tokeniser.find_places(&open.blocks);
            channel = Some((ChannelStream::new(Style::Qemu72, SIZE, 0), 0));
        }
        Self { main, channel, tokeniser, deltas: Deltas::new(shared, kind) }
    }

    /// Sends the pages as one chunk.
    fn send(&mut self, shared: &Shared, pages: &[(u64, [u8; SIZE])]) -> Counts {
        let (bytes, epoch) = match &mut self.channel {
            Some((channel, epoch)) => {
                let pages: Vec<_> = pages.iter().map(|(at, page)| (*at, Some(&page[..]))).collect();
                channel.packet(1, BLOCK, &pages, false);
                *epoch += 1;
                (channel.take(), *epoch)
            }
            None => {
                self.main.section(Section::Part);
                for (at, page) in pages {
                    self.main.page(BLOCK, *at, page);
                }
                self.main.end_of_section();
                (self.main.take(), 0)
            }
        };
        let mut tokens = Vec::new();
        self.tokeniser.feed(&bytes, &mut tokens);
        let mut chunk = shared.session.plain().take_until(None, || false).unwrap();
        chunk[..bytes.len()].copy_from_slice(&bytes);
        let mut header = Header::free(FrameType::Data, 0);
        let stream = (&mut self.tokeniser, &tokens[..], epoch);
        let chunk = (&mut chunk, bytes.len());
        self.deltas.take(shared, &mut header, chunk, stream).unwrap_or_default()
    }
}

const KINDS: [Kind; 2] = [Kind::Main, Kind::Multifd];

/// Regression: no test failed where pages were stored whatever the budget allows, which costs an
/// idle guest 5 % of CPU time.
#[test]
fn without_budget_only_pages_that_are_sent_again_are_stored() {
    const CACHE: u64 = 1 << 20;
    for kind in KINDS {
        let receiver = crate::ServerConfig { delta_cache: CACHE, ..receiver() };
        with_session(
            receiver,
            |config| config.delta_cache = CACHE,
            |source| {
                let shared = &*source.handle().0;
                let mut stream = Stream::new(shared, kind);
                // A page behind another section, or a header, names its block, and is not stored.
                let counts = stream.send(shared, &pages(10..20, 1));
                assert!(counts.stored >= 9 && counts.deltas == 0, "{kind:?}: {counts:?}");
                shared.delta_budget.spend(Duration::MAX);
                let counts = stream.send(shared, &pages(20..30, 1));
                assert_eq!(counts, Counts::default(), "{kind:?}: sent first");
                let counts = stream.send(shared, &pages(10..20, 2));
                assert!(counts.stored >= 9 && counts.deltas >= 9, "{kind:?}: {counts:?}");
                let counts = stream.send(shared, &pages(20..30, 2));
                assert!(counts.stored >= 9 && counts.deltas == 0, "{kind:?}: {counts:?}");
                let counts = stream.send(shared, &pages(20..30, 3));
                assert!(counts.stored >= 9 && counts.deltas >= 9, "{kind:?}: {counts:?}");
            },
        );
    }
}

/// A source that knows pages 10 to 250 of the destination's seed.
fn with_seed(auto: bool, kind: Kind, test: impl FnOnce(&Shared, &mut Stream)) {
    let adapt = |config: &mut crate::SourceConfig| {
        config.seed = 1000;
        config.auto = auto.then(AutoConfig::default);
    };
    with_session(receiver(), adapt, |source| {
        let shared = &*source.handle().0;
        let hashes: Vec<_> =
            (10..250).map(|number| delta::page_hash(&[7; 32], &page(number, 1))).collect();
        let offer = delta::offer(0, &[7; 32], &hashes);
        shared.seed.known.write().unwrap().learn(&offer).unwrap();
        test(shared, &mut Stream::new(shared, kind));
    });
}

#[test]
fn without_budget_no_page_is_looked_up_in_the_seed() {
    for kind in KINDS {
        with_seed(false, kind, |shared, stream| {
            assert!(stream.send(shared, &pages(10..20, 1)).seeded >= 9, "{kind:?}");
            shared.delta_budget.spend(Duration::MAX);
            assert_eq!(stream.send(shared, &pages(20..30, 1)), Counts::default(), "{kind:?}");
        });
    }
}

/// Regression: pages were looked up however fast the link is.
#[test]
fn auto_looks_pages_up_in_the_seed_unless_the_link_is_too_fast_for_that() {
    // The rate of the link, if it was the bottleneck once, and that of QEMU: Mbyte/s.
    let turns = [
        (None, 100.0, true),
        (None, 300.0, false),
        // The link was not the bottleneck since then.
        (None, 100.0, false),
        // The look-ups have made a link of 1 Gbit/s as fast as it need be.
        (Some(120.0), 400.0, true),
        (Some(120.0), 2000.0, true),
        // The rate at which look-ups stop is higher than the one at which they begin.
        (Some(600.0), 400.0, true),
        (Some(1250.0), 400.0, false),
        (Some(600.0), 400.0, false),
        (Some(300.0), 400.0, true),
    ];
    for kind in KINDS {
        with_seed(true, kind, |shared, stream| {
            let auto = shared.auto.as_ref().expect("the codec is auto");
            assert!(stream.send(shared, &pages(10..20, 1)).seeded >= 9, "{kind:?}: at first");
            for (turn, (link, read, found)) in (2..).zip(turns) {
                auto.judge_seed(link.map(|rate| rate * 1e6), read * 1e6);
                let seeded = stream.send(shared, &pages(10 * turn..10 * turn + 10, 1)).seeded;
                assert_eq!(seeded >= 9, found, "{kind:?}, turn {turn}: {seeded}");
                assert_eq!(seeded > 0, found, "{kind:?}, turn {turn}: {seeded}");
            }
        });
    }
}
