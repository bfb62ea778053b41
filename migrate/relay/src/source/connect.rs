//! Creates a source relay: hello, session, codec threads, links.

mod candidates;

use super::admission;
use super::channel_deltas::ChannelDeltas;
use super::config::SourceConfig;
use super::encode::EncodeContext;
use super::history::OwnHistories;
use super::hung;
use super::reach::dial_patiently;
use super::run::Source;
use super::shared::{Connections, SeedSlots, Shared};
use super::sink::SourceSink;
use crate::auto::{Auto, AutoConfig};
use crate::counters::Counters;
use crate::error::RelayError;
use crate::postcopy::SharedSwitchover;
use crate::threads::{check_engines, open_devices, spawn, CODEC_END};
use candidates::Candidates;
use codec::Settings;
use pipeline::{Pool, PoolConfig, Submitter};
use ring::Ring;
use session::{
    dial, Grants, Hello, Histories, Link, Redial, Session, SessionError, Welcome, MAX_LINKS,
};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use tls::TlsError;

impl Source {
    /// Connects the links and starts the codec threads.
    ///
    /// # Errors
    /// The peer cannot be reached or refuses; the system refuses threads or memory.
    pub fn connect(config: &SourceConfig) -> Result<Self, RelayError> {
        Self::connect_with(config, None, &mut |_| {})
    }

    /// As [`connect`](Self::connect), with an accelerator for codec qatzip. Without one, and for
    /// anything the device does not do, software compresses. `notice` gets a message while the
    /// relay waits for the peer ([`SourceConfig::connect_timeout`],
    /// [`SourceConfig::answer_timeout`]).
    ///
    /// # Errors
    /// As for `connect`. The peer was informed, so that its target is free at once.
    pub fn connect_with(
        config: &SourceConfig,
        accelerator: Option<&Arc<qat::Qat>>,
        notice: &mut dyn FnMut(&str),
    ) -> Result<Self, RelayError> {
        let candidates = Candidates::new(config, accelerator.is_some());
        let hello = hello(config, &candidates)?;
        let (first, welcome) = dial_patiently(config, &hello, notice)?;
        let (token, pass) = (Some(welcome.token.clone()), welcome.pass);
        let asking = Hello { token, pass, ..hello.clone() };
        let redial =
            Redial::new(config.peer.clone(), &first, config.connector.clone(), asking.clone());
        let first = if welcome.again {
            // W4a: the welcome before has the grants.
            dial_patiently(config, &asking, notice).map(|(link, _)| link)
        } else {
            Ok(first)
        };
        let result = first.map_err(RelayError::from).and_then(|first| {
            let opened = (asking, first, welcome);
            Self::with_first_link(config, accelerator, candidates, opened, &redial)
        });
        if result.is_err() {
            // The peer's session is useless now; asking ends it. A peer that cannot be reached ends
            // it when its own time is over.
            let _ = redial.ask();
        }
        result
    }

    /// The remaining steps once link 0 is open.
    fn with_first_link(
        config: &SourceConfig,
        accelerator: Option<&Arc<qat::Qat>>,
        mut candidates: Candidates,
        (hello, first, welcome): (Hello, Link, Welcome),
        redial: &Redial,
    ) -> Result<Self, RelayError> {
        let grants = Grants {
            chunk_bytes: welcome.chunk_bytes as usize,
            stream_frames: welcome.stream_frames,
            shared_frames: welcome.shared_frames,
        };
        let (events, receiver) = mpsc::channel();
        let sink = SourceSink::new(events.clone());
        let lifeline = (hello.links, config.resume);
        let session =
            Session::new(config.peer.clone(), grants, grants.buffers(), lifeline, sink.clone())?;
        session.tolerate_silence(config.silence);
        if let Some(rate) = config.max_bandwidth {
            session.limit_rate(rate);
        }
        if let Some(turns) = &config.turns {
            session.take_turns(Arc::clone(turns));
        }
        if welcome.histories.is_some() {
            candidates.use_histories();
        }
        candidates.keep_known(&welcome.codecs);
        let settings = candidates.first(config);
        let CodecThreads { pool, accelerators, qpl } =
            codec_threads(config, settings, (&grants, welcome.histories), accelerator)?;
        let threads = config.compress_threads.max(1);
        let auto = config.auto.as_ref();
        let auto = auto.map(|auto| Arc::new(Auto::new(auto, candidates.all, threads)));
        let submitter = Submitter::new(pool, session.outbox().clone(), config.compress_wait_thread);
        let shared = Arc::new(Shared {
            session: session.clone(),
            submitter,
            spare: Arc::new(Ring::new(256)),
            counters: Arc::new(Counters::default()),
            accelerators,
            qpl,
            settings,
            auto,
            page_size: config.page_size as usize,
            setup_timeout: config.setup_timeout,
            delta_cache: AtomicU64::new(welcome.delta_cache),
            channel_deltas: ChannelDeltas::new(match welcome.channel_deltas {
                true => welcome.delta_cache,
                false => 0,
            }),
            delta_budget: delta::Budget::default(),
            seed: SeedSlots {
                is_wanted: config.seed > 0,
                is_promised: welcome.seed,
                base: delta::slots(welcome.delta_cache, config.page_size as usize),
                known: RwLock::default(),
            },
            pages: config.pages.clone(),
            connections: Mutex::new(Connections::default()),
            entrance: OnceLock::new(),
            refused: AtomicU32::new(0),
            read: admission::start,
            events,
            tail_read: AtomicBool::new(false),
            still_open_sent: AtomicBool::new(false),
            cancelling: Mutex::default(),
            ended_whole: AtomicBool::new(false),
            return_path: AtomicBool::new(false),
            between_messages: AtomicBool::new(true),
            postcopy: AtomicBool::new(false),
            only_preempt_is_silent: AtomicBool::new(false),
            switched: AtomicBool::new(false),
            cut_short: AtomicBool::new(false),
            switchover: SharedSwitchover::new(),
            peer_awaits_pong: welcome.pong,
            keeper: OnceLock::new(),
            keeper_has_socket: AtomicBool::new(false),
            handing_shut: AtomicBool::new(false),
            return_paths: AtomicUsize::new(0),
            over: AtomicBool::new(false),
            started: OnceLock::new(),
        });
        sink.set(&shared);
        let (redial, events) = (redial.clone(), Mutex::new(receiver));
        if let Err(error) = shared.start(config, &redial, first, hello) {
            shared.over.store(true, Ordering::Release);
            let reason = format!("the source relay could not start: {error}");
            session.fail(SessionError::Local { reason });
            session.join();
            return Err(error);
        }
        Ok(Self { shared, redial, events, has_run: AtomicBool::new(false) })
    }
}

impl Shared {
    /// Opens the other links, and starts the threads that replace lost links and that measure.
    fn start(
        self: &Arc<Self>,
        config: &SourceConfig,
        redial: &Redial,
        first: Link,
        hello: Hello,
    ) -> Result<(), RelayError> {
        open_links(config, &self.session, first, hello)?;
        self.session.supervise_links(Some(redial.clone()))?;
        if !self.accelerators.is_empty() {
            hung::watch(self)?;
        }
        config.auto.as_ref().map_or(Ok(()), |auto| watch(self, auto, config.page_size))
    }
}

/// The hello of link 0.
fn hello(config: &SourceConfig, candidates: &Candidates) -> Result<Hello, RelayError> {
    Ok(Hello {
        links: config.links.clamp(1, MAX_LINKS),
        name: config.name.clone(),
        setup: config.setup.clone(),
        codecs: candidates.codecs(),
        delta_cache: config.delta_cache,
        histories: config.histories(),
        seed: config.seed.min(delta::MAX_SEED),
        again: true,
        ..Hello::of_one_link(config.page_size)?
    })
}

/// The threads, and the counters of their devices and of libqpl.
struct CodecThreads {
    pool: Arc<Pool<super::encode::EncodeJob>>,
    accelerators: Vec<Arc<qat::Counters>>,
    qpl: Vec<Arc<qpl::Counters>>,
}

/// Starts the codec threads.
fn codec_threads(
    config: &SourceConfig,
    settings: Settings,
    (grants, histories): (&Grants, Option<Histories>),
    accelerator: Option<&Arc<qat::Qat>>,
) -> Result<CodecThreads, RelayError> {
    // Contexts are created here, so that a wrong level is an error and not a dead thread.
    let (threads, levels) = (config.compress_threads.max(1), config.history_levels());
    let (chunk_bytes, device, library) =
        (grants.chunk_bytes, accelerator.cloned(), config.qpl.clone());
    let make = move || {
        let context = |number| {
            let own = histories.map(|histories| OwnHistories::new(histories, number, levels));
            EncodeContext::new(settings, chunk_bytes, device.as_ref(), library.as_ref(), own)
        };
        (0..threads).map(context).collect::<Result<Vec<_>, _>>()
    };
    let made = open_devices(accelerator, "repeat the migration", make)?;
    let mut contexts = made.map_err(|error| RelayError::Unsupported {
        what: format!("cannot use codec {}: {error}", settings.name()),
    })?;
    check_engines(accelerator, contexts.iter().filter_map(EncodeContext::on_device))?;
    let accelerators: Vec<_> = contexts.iter().filter_map(EncodeContext::accelerator).collect();
    let qpl = contexts.iter().filter_map(EncodeContext::qpl).collect();
    let threads = PoolConfig { threads: contexts.len(), name: "compress", ..PoolConfig::default() };
    let next = |_| contexts.pop().expect("one context was made for each thread");
    let pool = Pool::new(threads, next).map_err(|source| RelayError::Resource {
        what: "cannot start the codec threads".into(),
        source,
    })?;
    if !accelerators.is_empty() {
        pool.leave_behind_after(CODEC_END);
    }
    Ok(CodecThreads { pool, accelerators, qpl })
}

/// Adds link 0 and opens the others. `hello` has the session's token.
fn open_links(
    config: &SourceConfig,
    session: &Arc<Session>,
    first: Link,
    hello: Hello,
) -> Result<(), RelayError> {
    session.add_link(0, first)?;
    for link in 1..hello.links {
        let hello = Hello { link, ..hello.clone() };
        let made = dial(&config.peer, config.connector.as_ref(), &hello)
            .and_then(|(made, _)| session.add_link(link, made));
        match made {
            Ok(()) => {}
            // Reopened later, like a link that is lost.
            Err(error) if !config.resume.is_zero() && may_come_later(&error) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Whether a link that could not be opened may be opened later.
fn may_come_later(error: &SessionError) -> bool {
    use session::SessionError::{Connect, HelloLate, LinkLost, Resource, Tls};
    matches!(
        error,
        LinkLost { .. }
            | HelloLate { .. }
            | Connect { .. }
            | Resource { .. }
            | Tls(TlsError::Late { .. } | TlsError::Cut { .. })
    )
}

/// Starts the thread that measures the flow for `auto`. It ends with the session.
fn watch(shared: &Arc<Shared>, config: &AutoConfig, page_size: u32) -> Result<(), RelayError> {
    let Some(auto) = shared.auto.clone() else { return Ok(()) };
    let explain = config.explain.clone();
    let (session, counters) = (shared.session.clone(), shared.counters.clone());
    let (pool, weak) = (shared.submitter.pool().clone(), Arc::downgrade(shared));
    spawn("auto", move || {
        let worker_cpu = || pool.cpu_times().iter().sum();
        let is_over = || {
            session.failure().is_some()
                || weak.upgrade().is_none_or(|shared| shared.over.load(Ordering::Acquire))
        };
        auto.watch(&session, &counters, worker_cpu, page_size, explain.as_ref(), is_over);
    })
}
