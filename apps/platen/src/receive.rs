//! `platen receive`: accepts migrations and delivers each to its QEMU.

use crate::monitor::open_monitor;
use crate::network;
use crate::qat_command;
use crate::receive_args::{shown, Named, ReceiveArgs};
use crate::receive_settings::FormerSettings;
use crate::report::{process_cpu, Report};
use crate::report_file::{aside, check_file, NOT_TAKEN};
use crate::say::{say, show};
use crate::seed::StoreSeed;
use crate::source_end::UNCONFIRMED;
use anyhow::{bail, Context};
use qmp::{Qmp, QmpError};
use relay::{Destination, Host, Server, ServerConfig, UnixAddress};
use session::{Grants, Hello, Setup};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How long the destination QEMU may take to answer, and to report that it has loaded the VM.
const LOADED: Duration = Duration::from_secs(10);

/// Most reports that wait for their disk, or for the reader of standard output.
const UNWRITTEN: usize = 32;

/// The reports of all migrations.
struct Reports {
    json: Option<PathBuf>,
    /// Serialises writes to the report file.
    writing: Mutex<()>,
    /// Reports that are being written, each by a thread.
    unwritten: AtomicUsize,
}

/// The place of a report that is being written.
struct Place(Arc<Reports>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.unwritten.fetch_sub(1, Ordering::AcqRel);
    }
}

struct Receiver {
    targets: Vec<(Option<String>, UnixAddress)>,
    monitors: Vec<(Option<String>, UnixAddress)>,
    /// Former settings of the QEMUs at `monitors`.
    settings: FormerSettings,
    reports: Arc<Reports>,
    succeeded: AtomicU64,
    unconfirmed: AtomicU64,
    failed: AtomicU64,
    /// Set once the server exists, for its accelerators' counters.
    server: OnceLock<Weak<Server>>,
}

impl Reports {
    /// A place for a report; `None` while as many are being written as may. A disk that hangs, or a
    /// reader of standard output that does not read, keeps the threads.
    fn place(self: &Arc<Self>) -> Option<Place> {
        // Given back if there are too many, and by a thread that panics.
        let place = Place(Arc::clone(self));
        (self.unwritten.fetch_add(1, Ordering::AcqRel) < UNWRITTEN).then_some(place)
    }

    /// Writes `report` on a thread of its own, and says why if it is not written.
    fn publish(self: &Arc<Self>, report: Report) {
        let Some(place) = self.place() else {
            return say(&format!(
                "the report of this migration is lost: {UNWRITTEN} before it are not written yet"
            ));
        };
        let written = aside(move || place.0.write(&report));
        match written {
            Some(Ok(())) => {}
            Some(Err(error)) => say(&format!("{error:#}")),
            None => say(NOT_TAKEN),
        }
    }

    fn write(&self, report: &Report) -> anyhow::Result<()> {
        let written = self.json.as_ref().map_or(Ok(()), |path| {
            // Not while standard output is written: its reader may not read, and the next
            // migration's line must not wait for that.
            let _one = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
            let open = File::options().create(true).append(true).open(path);
            open.and_then(|mut file| writeln!(file, "{}", report.json()))
                .with_context(|| format!("cannot write the report to {}", path.display()))
        });
        show(&report.text()).unwrap_or_else(|error| say(&format!("{error:#}")));
        written
    }
}

impl Receiver {
    fn monitor(&self, target: &Option<String>) -> Option<&UnixAddress> {
        self.monitors.iter().find(|(name, _)| name == target).map(|(_, address)| address)
    }

    /// Counts how a migration ended.
    fn count(&self, status: &str, target: &Option<String>) {
        match status {
            "completed" => self.succeeded.fetch_add(1, Ordering::AcqRel),
            "unconfirmed" => {
                say(&format!(
                    "{} was given the whole stream, but uses no return path: whether its QEMU runs the VM is not known",
                    shown(target)
                ));
                self.unconfirmed.fetch_add(1, Ordering::AcqRel)
            }
            _ => self.failed.fetch_add(1, Ordering::AcqRel),
        };
    }
}

/// Tells a destination QEMU to listen. QEMU listens for one migration only, so this happens when
/// the first bytes of one arrive: a source QEMU that refuses to migrate then costs the destination
/// nothing.
fn start_listening(monitor: &UnixAddress, deliver: &UnixAddress) -> anyhow::Result<()> {
    let mut qmp = open_monitor(monitor)?;
    match qmp.migrate_incoming(&deliver.to_string()) {
        // QEMU was told before. The connection will show whether it listens at `deliver`.
        Err(QmpError::Refused { desc, .. }) if desc.contains("already been started") => {
            say(&format!("monitor {monitor}: the destination QEMU listens already"));
            Ok(())
        }
        result => Ok(result?),
    }
}

impl Host for Receiver {
    fn prepare(&self, target: &Option<String>, hello: &Hello) -> Result<(), String> {
        let Some(monitor) = self.monitor(target) else { return Ok(()) };
        // A bare relay does not report how QEMU was set up; assume QEMU's default, a single stream
        // with return path.
        let setup = hello.setup.clone().unwrap_or(Setup::with_return_path());
        self.settings
            .set_up(target, monitor, &setup)
            .map_err(|error| format!("the destination cannot be set up: {error:#}"))
    }

    fn listen(&self, target: &Option<String>) -> Result<(), String> {
        let deliver = self.targets.iter().find(|(name, _)| name == target);
        let (Some(monitor), Some((_, deliver))) = (self.monitor(target), deliver) else {
            return Ok(());
        };
        start_listening(monitor, deliver)
            .map_err(|error| format!("the destination QEMU does not listen: {error:#}"))
    }

    fn serve(&self, target: &Option<String>, destination: &Destination) {
        let peer = destination.session().peer.clone();
        say(&format!("migration from {peer} to {} begins", shown(target)));
        let started = Instant::now();
        let cpu = process_cpu();
        let measured = || {
            let transferred = destination.session().bytes_in.load(Ordering::Relaxed);
            let mut report = Report::of(destination.counters(), transferred, started.elapsed());
            report.set_resumes(destination.session().resumes());
            report.cpu_seconds.destination = Some(process_cpu() - cpu);
            report.name.clone_from(target);
            let server = self.server.get().and_then(Weak::upgrade);
            report.accelerators = server.map_or(Vec::new(), |server| server.accelerators());
            report
        };
        let result = destination.run(|| measured().for_peer());
        if let (false, Err(error)) = (destination.has_begun(), &result) {
            // There was no migration, so there is no report. The next one sets QEMU up again.
            if let Some(monitor) = self.monitor(target) {
                self.settings.put_back_unused(target, monitor);
            }
            return say(&format!("{peer} left before it migrated to {}: {error}", shown(target)));
        }
        let mut report = measured();
        let vm = self.monitor(target).map(|monitor| vm_state(monitor, result.is_ok()));
        if let Some(monitor) = self.monitor(target) {
            self.settings.put_back(target, monitor);
        }
        match &result {
            Ok(end) => {
                // Without a return path QEMU confirms nothing to a relay, but its monitor may.
                let verdict = vm.as_ref().and_then(|vm| vm.migration.as_deref());
                report.status = match (end.confirmed, verdict) {
                    (true, _) | (false, Some("completed")) => "completed",
                    (false, Some("failed")) => "failed",
                    (false, _) => "unconfirmed",
                }
                .into();
            }
            Err(error) => {
                report.status = "failed".into();
                report.error = Some(error.to_string());
                say(&format!("migration from {peer} to {} failed: {error}", shown(target)));
            }
        }
        self.count(&report.status, target);
        report.vm = vm.map(|vm| vm.text);
        self.reports.publish(report);
    }

    fn notice(&self, text: &str) {
        say(text);
    }
}

/// A destination QEMU's status of its VM.
struct VmState {
    /// Text for a person.
    text: String,
    /// The status of its migration, if QEMU answers.
    migration: Option<String>,
}

impl VmState {
    /// Of a QEMU that has given this instead of an answer.
    fn without(error: &QmpError) -> Self {
        let text = match error {
            QmpError::TimedOut { .. } | QmpError::NoGreeting { .. } => "its QEMU does not answer",
            _ => "its QEMU has ended",
        };
        Self { text: text.into(), migration: None }
    }
}

/// Queries the destination QEMU's status of its VM.
fn vm_state(monitor: &UnixAddress, expect_loaded: bool) -> VmState {
    let mut qmp = match Qmp::connect(monitor.path(), LOADED) {
        Ok(qmp) => qmp,
        Err(error) => return VmState::without(&error),
    };
    let until = Instant::now() + LOADED;
    loop {
        let info = match qmp.query_migrate() {
            Ok(info) => info,
            Err(error) => return VmState::without(&error),
        };
        let status = info.status().to_string();
        if !expect_loaded || info.is_over() || Instant::now() > until {
            let vm = qmp.query_status().map_or("gone".into(), |vm| vm.status);
            let why = info.error_desc.map_or(String::new(), |desc| format!(" ({desc})"));
            let text = format!("{vm}, migration {status}{why}");
            return VmState { text, migration: Some(status) };
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(crate) fn run(args: &ReceiveArgs) -> anyhow::Result<ExitCode> {
    args.relay.apply_cpus()?;
    args.check()?;
    let of = |named: &[Named]| -> Vec<_> {
        named.iter().map(|named| (named.name.clone(), named.address.clone())).collect()
    };
    let receiver = Arc::new(Receiver {
        targets: args.targets().map(|named| (named.name.clone(), named.address.clone())).collect(),
        monitors: of(&args.qmp),
        settings: FormerSettings::default(),
        reports: Arc::new(Reports {
            json: args.json.clone(),
            writing: Mutex::new(()),
            unwritten: AtomicUsize::new(0),
        }),
        succeeded: AtomicU64::new(0),
        unconfirmed: AtomicU64::new(0),
        failed: AtomicU64::new(0),
        server: OnceLock::new(),
    });
    for (_, monitor) in &receiver.monitors {
        open_monitor(monitor)?;
    }
    let acceptor = network::acceptor(&args.relay.tls, &args.peer_name)?;
    let listener = network::listen(&args.listen)?;
    // After `listen`, so that the reports of a receiver that has the port already are not
    // overwritten.
    if let Some(path) = &args.json {
        check_file(Some(path))?;
        File::create(path)
            .with_context(|| format!("cannot write the report to {}", path.display()))?;
    }
    let qat = qat_command::receiver(args.accelerator, &args.qat)?;
    let config = ServerConfig {
        qat: qat.clone(),
        targets: args
            .targets()
            .map(|named| (named.name.clone(), named.address.clone().into()))
            .collect(),
        acceptor,
        decompress_threads: args.threads(),
        page_size: args.relay.page_size,
        grants: Grants::default(),
        resume: args.relay.resume(),
        silence: session::SILENCE,
        delta_cache: args.delta_cache(),
        seed: args.seed.as_deref().map(StoreSeed::at),
        history: args.history(),
    };
    let server = Server::new(config, receiver.clone())?;
    qat_command::say_problems(qat);
    let _ = receiver.server.set(Arc::downgrade(&server));
    let stopper = server.clone();
    let interrupted = Arc::new(AtomicBool::new(false));
    let seen = interrupted.clone();
    ctrlc::set_handler(move || {
        seen.store(true, Ordering::Release);
        stopper.stop();
    })
    .context("cannot handle signals")?;
    say(&format!("listening on {}", listener.local_addr()?));
    let served = server.run(&listener, args.once);
    // Restore settings for migrations that never began.
    for (target, monitor) in &receiver.monitors {
        receiver.settings.put_back(target, monitor);
    }
    served?;
    if server.strangers() > 0 {
        say(&format!("connections turned away: {}", server.strangers()));
    }
    let unconfirmed = receiver.unconfirmed.load(Ordering::Acquire) > 0;
    if args.once && receiver.succeeded.load(Ordering::Acquire) == 0 {
        if unconfirmed {
            return Ok(ExitCode::from(UNCONFIRMED));
        }
        bail!("the migration did not succeed");
    }
    if interrupted.load(Ordering::Acquire) && receiver.failed.load(Ordering::Acquire) > 0 {
        bail!("interrupted; at least one migration failed");
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// As where a panic does not abort the process.
    #[test]
    fn a_report_whose_thread_panics_gives_its_place_back() {
        let (writing, unwritten) = (Mutex::new(()), AtomicUsize::new(0));
        let reports = Arc::new(Reports { json: None, writing, unwritten });
        let mut places: Vec<_> = (0..UNWRITTEN).map(|_| reports.place().unwrap()).collect();
        assert!(reports.place().is_none() && reports.place().is_none());
        let place = places.pop();
        let panics = move || {
            let _place = place;
            panic!("the test");
        };
        assert!(std::thread::spawn(panics).join().is_err());
        assert!(reports.place().is_some());
        drop(places);
        assert_eq!(reports.unwritten.load(Ordering::Acquire), 0);
    }

    #[test]
    fn a_qemu_that_has_ended_is_told_from_one_that_does_not_answer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let ask = || Qmp::connect(&path, Duration::from_millis(20)).unwrap_err();
        assert_eq!(VmState::without(&ask()).text, "its QEMU has ended");
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(VmState::without(&ask()).text, "its QEMU does not answer");
        drop(listener);
        // A process that another test is starting has a copy of the socket until its exec.
        while VmState::without(&ask()).text != "its QEMU has ended" {}
    }
}
