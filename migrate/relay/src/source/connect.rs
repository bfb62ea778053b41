//! Making a source relay: hello, session, codec threads, links.

use super::config::SourceConfig;
use super::encode::EncodeContext;
use super::intake;
use super::run::Source;
use super::shared::Shared;
use super::sink::SourceSink;
use crate::accelerator::{Accelerator, AcceleratorCounters};
use crate::auto::{Auto, AutoConfig};
use crate::counters::Counters;
use crate::error::RelayError;
use crate::postcopy::SharedSwitchover;
use crate::threads::spawn;
use codec::{Codec, Settings};
use pipeline::{Lanes, LanesConfig, Submitter};
use ring::Ring;
use session::{
    dial, random_id, Grants, Hello, Link, Redial, Session, SessionError, Welcome, MAX_LINKS,
};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, OnceLock};

impl Source {
    /// Connects the links and starts the codec threads.
    ///
    /// # Errors
    /// The peer cannot be reached or refuses; threads or memory cannot be had.
    pub fn connect(config: &SourceConfig) -> Result<Self, RelayError> {
        Self::connect_with(config, None)
    }

    /// As [`connect`](Self::connect), with an accelerator for codec qatzip. Without one that codec
    /// is software, and what the device does not do, for whatever reason, is done in software.
    ///
    /// # Errors
    /// As for `connect`.
    pub fn connect_with(
        config: &SourceConfig,
        accelerator: Option<&Accelerator>,
    ) -> Result<Self, RelayError> {
        let candidates = Candidates::new(config, accelerator.is_some());
        let hello = hello(config, &candidates)?;
        let (first, welcome) = dial(&config.peer, config.connector.as_ref(), &hello)?;
        Self::with_first_link(config, accelerator, candidates, hello, first, welcome)
    }

    /// The rest, once link 0 stands.
    fn with_first_link(
        config: &SourceConfig,
        accelerator: Option<&Accelerator>,
        mut candidates: Candidates,
        hello: Hello,
        first: Link,
        welcome: Welcome,
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
        candidates.keep_known(&welcome.codecs);
        let settings = candidates.first(config);
        let (lanes, accelerators) = codec_threads(config, settings, &grants, accelerator)?;
        let threads = config.compress_threads.max(1);
        let auto = config.auto.as_ref();
        let auto = auto.map(|auto| Arc::new(Auto::new(auto, candidates.all, threads)));
        let submitter =
            Submitter::new(lanes, session.outbox().clone(), config.compress_wait_thread);
        let shared = Arc::new(Shared {
            session: session.clone(),
            submitter,
            spare: Arc::new(Ring::new(256)),
            counters: Arc::new(Counters::default()),
            accelerators,
            settings,
            auto,
            page_size: config.page_size as usize,
            delta_cache: AtomicU64::new(welcome.delta_cache),
            streams: Mutex::new(Vec::new()),
            listening: OnceLock::new(),
            read: intake::start,
            events,
            tail_read: AtomicBool::new(false),
            still_open_sent: AtomicBool::new(false),
            return_path: AtomicBool::new(false),
            postcopy: AtomicBool::new(false),
            switched: AtomicBool::new(false),
            switchover: SharedSwitchover::new(),
            keeper: OnceLock::new(),
            keeper_has_socket: AtomicBool::new(false),
            handing_shut: AtomicBool::new(false),
            return_paths: AtomicUsize::new(0),
            over: AtomicBool::new(false),
            started: OnceLock::new(),
        });
        sink.set(&shared);
        let hello = Hello { token: Some(welcome.token), ..hello };
        let redial = open_links(config, &session, first, hello)?;
        session.supervise_links(Some(redial.clone()))?;
        if let Some(config) = &config.auto {
            watch(&shared, config)?;
        }
        Ok(Self { shared, redial, events: Mutex::new(receiver) })
    }
}

/// Codecs and levels that this migration may use.
struct Candidates {
    all: Vec<Settings>,
    /// What an accelerator does, with `auto`.
    device: Option<Settings>,
}

impl Candidates {
    fn new(config: &SourceConfig, accelerator: bool) -> Self {
        let device = Settings::new(Codec::DeflateQz, None).ok();
        let device = device.filter(|_| config.auto.is_some() && accelerator);
        let mut all = match &config.auto {
            Some(_) => controller::Config::candidates(),
            None => vec![config.settings],
        };
        all.extend(device);
        Self { all, device }
    }

    /// By name, each once.
    fn codecs(&self) -> Vec<String> {
        let mut names = Vec::new();
        for settings in &self.all {
            let name = settings.codec().name();
            if !names.iter().any(|known| known == name) {
                names.push(name.to_string());
            }
        }
        names
    }

    /// Leaves out what the peer does not decode.
    fn keep_known(&mut self, known: &[String]) {
        self.all.retain(|settings| {
            settings.codec() == Codec::Raw
                || known.iter().any(|known| known == settings.codec().name())
        });
    }

    /// What the codec threads begin with: with `auto` what an accelerator does, or what is chosen
    /// first.
    fn first(&self, config: &SourceConfig) -> Settings {
        match (&config.auto, self.device) {
            (None, _) => config.settings,
            (Some(_), Some(device)) if self.all.contains(&device) => device,
            (Some(_), _) => Settings::default(),
        }
    }
}

/// The hello of link 0.
fn hello(config: &SourceConfig, candidates: &Candidates) -> Result<Hello, RelayError> {
    Ok(Hello {
        session: random_id()?,
        link: 0,
        links: config.links.clamp(1, MAX_LINKS),
        token: None,
        page_size: config.page_size,
        name: config.name.clone(),
        setup: config.setup.clone(),
        codecs: candidates.codecs(),
        delta_cache: config.delta_cache,
        ask: false,
    })
}

/// Starts the codec threads; with what their accelerators count.
fn codec_threads(
    config: &SourceConfig,
    settings: Settings,
    grants: &Grants,
    accelerator: Option<&Accelerator>,
) -> Result<(Arc<Lanes<super::encode::EncodeJob>>, Vec<AcceleratorCounters>), RelayError> {
    // Contexts are made here so that a bad level is an error and not a dead thread.
    let (mut contexts, mut accelerators) = (Vec::new(), Vec::new());
    for _ in 0..config.compress_threads.max(1) {
        let context = EncodeContext::new(settings, grants.chunk_bytes, accelerator);
        let context = context.map_err(|error| RelayError::Unsupported {
            what: format!("cannot use codec {}: {error}", settings.codec().name()),
        })?;
        accelerators.extend(context.accelerator());
        contexts.push(context);
    }
    let threads =
        LanesConfig { threads: contexts.len(), name: "compress", ..LanesConfig::default() };
    let next = |_| contexts.pop().expect("one context was made for each thread");
    let lanes = Lanes::new(threads, next).map_err(|source| RelayError::Resource {
        what: "cannot start the codec threads".into(),
        source,
    })?;
    Ok((lanes, accelerators))
}

/// Adds link 0 and makes the others. `hello` has the session's token.
fn open_links(
    config: &SourceConfig,
    session: &Arc<Session>,
    first: Link,
    hello: Hello,
) -> Result<Redial, RelayError> {
    let peer = &config.peer;
    let redial = Redial::new(peer.clone(), &first, config.connector.clone(), hello.clone());
    session.add_link(0, first)?;
    for link in 1..hello.links {
        let hello = Hello { link, ..hello.clone() };
        match dial(peer, config.connector.as_ref(), &hello) {
            Ok((socket, _)) => session.add_link(link, socket)?,
            Err(error) => {
                let reason = "the client could not open all its links".into();
                session.fail(SessionError::Local { reason });
                session.join();
                return Err(error.into());
            }
        }
    }
    Ok(redial)
}

/// Starts the thread that looks at the flow for `auto`. It ends with the session.
fn watch(shared: &Arc<Shared>, config: &AutoConfig) -> Result<(), RelayError> {
    let Some(auto) = shared.auto.clone() else { return Ok(()) };
    let explain = config.explain.clone();
    let (session, counters) = (shared.session.clone(), shared.counters.clone());
    let (lanes, weak) = (shared.submitter.lanes().clone(), Arc::downgrade(shared));
    spawn("auto", move || {
        let worker_cpu = || lanes.cpu_times().iter().sum();
        let is_over = || {
            session.failure().is_some()
                || weak.upgrade().is_none_or(|shared| shared.over.load(Ordering::Acquire))
        };
        auto.watch(&session, &counters, worker_cpu, explain.as_ref(), is_over);
    })
}
