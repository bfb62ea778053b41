//! `platen migrate`: controls the source QEMU by its monitor and relays its stream.

use crate::args::MigrateArgs;
use crate::ending::Ending;
use crate::ending_options::wanted_capabilities;
use crate::interrupt;
use crate::lost_writes::warn_of_lost_writes;
use crate::migrate_cancel::{cancel_late, Cancel, Passed, Stop};
use crate::migrate_monitor::Watched;
use crate::migrate_outcome::{fill, verdict, HELD};
use crate::monitor::{open_monitor, refuse_colo, refuse_in_progress, refuse_mode, refuse_tls};
use crate::network::private_dir;
use crate::progress::{Bar, Feed};
use crate::report_file::check_file;
use crate::say::say;
use crate::seed::OFFERS;
use crate::settings::Before;
use crate::source_end::{listen, Measure, Plan, UNCONFIRMED};
use anyhow::{bail, Context};
use converge::Postcopy;
use nix::sys::signal::Signal;
use qmp::{MigrationInfo, Qmp, QmpError};
use relay::{RelayError, Source, SourceEnd, UnixAddress};
use serde_json::json;
use session::Setup;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{mpsc, Arc};
use std::time::{Duration, Instant};

/// The interval between queries of the monitor.
const ASK: Duration = Duration::from_millis(250);
const HELD_BY_QEMU: &str =
    "the VM is stopped: the source QEMU's capability pause-before-switchover is on, and QEMU waits \
     for {\"execute\":\"migrate-continue\",\"arguments\":{\"state\":\"pre-switchover\"}} at \
     another of its monitors. Or interrupt: the migration is cancelled, and the VM goes on";

const WITHOUT_RETURN_PATH: &str =
    "unconfirmed: the whole stream was delivered, but another client of the monitor has switched \
     return-path off, so nobody has heard whether the destination QEMU has loaded the VM. Look there";

/// Refuses a migration that is impossible, before anything is changed.
pub(crate) fn check(qmp: &mut Qmp, args: &MigrateArgs) -> anyhow::Result<()> {
    refuse_in_progress(qmp, "the source QEMU")?;
    let parameters = qmp.query_parameters()?;
    refuse_tls(&parameters, "source")?;
    refuse_mode(&parameters, "the source QEMU")?;
    refuse_colo(&qmp.execute("query-migrate-capabilities", None)?, "source")?;
    args.ending.check(qmp, args.channels.count())
}

/// Sets the source QEMU's capabilities and parameters.
fn set_up(qmp: &mut Qmp, settings: &mut Before, args: &MigrateArgs) -> anyhow::Result<Ending> {
    let channels = args.channels.count();
    let mut capabilities = wanted_capabilities(&args.ending)?;
    capabilities.extend([
        ("events", true),
        ("return-path", true),
        ("multifd", channels > 0),
        ("compress", false),
        ("zero-copy-send", false),
    ]);
    settings.set(qmp, &capabilities)?;
    // QEMU counts uncompressed bytes; its default of 128 MiB/s would cap a 1 Gbit/s link before
    // compression.
    settings.set_parameter(qmp, "max-bandwidth", json!(0))?;
    if channels > 0 {
        settings.set_parameter(qmp, "multifd-channels", json!(channels))?;
        settings.set_parameter(qmp, "multifd-compression", json!("none"))?;
    }
    Ending::prepare(&args.ending, args.source.explain, qmp, settings)
}

pub(crate) fn run(args: &MigrateArgs) -> anyhow::Result<ExitCode> {
    if args.feed {
        // Otherwise `ps` without arguments shows the last part of /proc/self/exe.
        let _ = rustix::thread::set_name(c"platen");
        // A service manager that stops `evacuate` sends SIGTERM to all its processes. With the
        // interrupt of `evacuate` that would be the second one, which forces the end.
        crate::block(&[Signal::SIGTERM]);
    }
    let postcopy = args.ending.postcopy()? != Postcopy::Never;
    check_file(args.source.json.as_deref())?;
    let channels = args.channels.count();
    let setup = Setup { channels, postcopy, ..Setup::with_return_path() };
    let plan = Plan::new(&args.source, &args.connect, Some(setup))?;
    let monitor = || format!("monitor {}", args.qmp);
    let mut settings = Before::with_keeper(&args.qmp)?;
    let mut qmp = open_monitor(&args.qmp)?;
    check(&mut qmp, args).with_context(monitor)?;
    warn_of_lost_writes(&mut qmp);
    let name = qmp.query_name().with_context(monitor)?;
    let result = migrate(args, &plan, &mut qmp, &mut settings);
    // A migration that is not over yet keeps its settings; the helper restores them later.
    if let Err(error) = settings.put_back(&mut qmp) {
        say(&format!(
            "{:#}; a helper process tries again until QEMU takes them",
            error.context(monitor())
        ));
    }
    // Behind all that others wait for. The monitor serves one client at a time.
    drop(qmp);
    if result.is_ok() {
        plan.write_seed(name.or_else(|| args.source.name.clone()).as_deref());
    }
    result
}

/// Migrates with QEMU's settings changed.
fn migrate(
    args: &MigrateArgs,
    plan: &Plan,
    qmp: &mut Qmp,
    settings: &mut Before,
) -> anyhow::Result<ExitCode> {
    let options = &args.source;
    let version = qmp.version();
    let monitor = || format!("monitor {}", args.qmp);
    let mut ending = set_up(qmp, settings, args).with_context(monitor)?;
    let dir = private_dir()?;
    let address = UnixAddress::from(dir.path().join("migrate.sock"));
    let listening = listen(&address)?;
    let measure = Measure::begin(plan.settings);
    let source = Arc::new(plan.connect(&listening, |_| {})?);
    let interrupts = interrupt::counted()?;
    let running = start(&source, measure)?;
    let is_interrupted = || interrupts.load(Ordering::Acquire) > 0;
    source.await_seed(OFFERS, || !is_interrupted());
    if is_interrupted() {
        source.handle().stop();
        let _ = running.iter().find(|message| matches!(message, Message::Ended(_)));
        bail!("cancelled; {}", source_vm(qmp));
    }
    settings.cancel_held_at_death()?;
    ending.begin();
    if let Err(error) = qmp.migrate(&address.to_string()) {
        if !matches!(error, QmpError::TimedOut { .. }) {
            // Another client's migration may be in progress, which platen must not cancel.
            let _ = settings.migration_is_over();
        }
        source.handle().end(&format!("the source QEMU has not begun to migrate: {error}"));
        let _ = running.iter().find(|message| matches!(message, Message::Ended(_)));
        return Err(error).with_context(monitor);
    }
    let feed = args.feed.then(Feed::new);
    let watched = (&*source, feed);
    let monitored = (&mut *qmp, Watched::new(&args.qmp));
    let result = watch(monitored, (settings, &mut ending), watched, &running, &interrupts);
    let info = verdict(qmp, result.is_err().then(Instant::now));
    if info.as_ref().is_some_and(MigrationInfo::is_over) {
        // The next migration is another client's.
        let _ = settings.migration_is_over();
    }
    let mut report = measure.report(&source);
    report.channels = Some(args.channels.count());
    report.links = Some(options.links);
    report.qemu = Some(version.to_string());
    report.name.clone_from(&options.name);
    report.set_ending(&ending);
    let cancelled = interrupts.load(Ordering::Acquire) > 0 || ending.cancelled.is_some();
    fill(&mut report, info.as_ref(), &result, cancelled);
    report.publish(options.json.as_deref());
    match result {
        _ if report.status == "completed" => Ok(ExitCode::SUCCESS),
        _ if report.status == "cancelled" => {
            let why = ending.cancelled.map_or(String::new(), |why| format!(" ({why})"));
            bail!("cancelled{why}; {}", source_vm(qmp))
        }
        Err(error) => bail!("{:#} ({})", anyhow::Error::from(error), source_vm(qmp)),
        Ok(_) if report.status == "unconfirmed" => {
            say(WITHOUT_RETURN_PATH);
            Ok(ExitCode::from(UNCONFIRMED))
        }
        Ok(_) => bail!("{} ({})", report.error.unwrap_or_default(), source_vm(qmp)),
    }
}

/// The source QEMU's status of its VM.
fn source_vm(qmp: &mut Qmp) -> String {
    match qmp.query_status() {
        Ok(vm) => format!("the source QEMU's VM is '{}'", vm.status),
        Err(error) => format!("the source QEMU's monitor does not answer: {error}"),
    }
}

/// Runs the relay on a thread of its own, because this one uses the monitor.
fn start(source: &Arc<Source>, measure: Measure) -> anyhow::Result<mpsc::Receiver<Message>> {
    let (sender, receiver) = mpsc::channel();
    let source = source.clone();
    let notices = sender.clone();
    let body = move || {
        let notice = |text: &str| {
            let _ = notices.send(Message::Notice(text.to_string()));
        };
        let result = source.run(notice, || measure.for_peer(&source));
        let _ = sender.send(Message::Ended(result));
    };
    let thread = std::thread::Builder::new().name("relay".into()).spawn(body);
    thread.context("cannot start a thread")?;
    Ok(receiver)
}

enum Message {
    Notice(String),
    Ended(Result<SourceEnd, RelayError>),
}

/// Shows progress, ends the migration as the options say, and handles interrupts until the relay
/// has ended.
fn watch(
    (qmp, mut monitor): (&mut Qmp, Watched<'_>),
    (settings, ending): (&mut Before, &mut Ending),
    (source, feed): (&Source, Option<Feed>),
    running: &mpsc::Receiver<Message>,
    interrupts: &AtomicU32,
) -> Result<SourceEnd, RelayError> {
    let mut bar = Bar::new();
    let handle = source.handle();
    let mut stop = Stop::new(interrupts, feed.is_some());
    let mut told_of_hold = false;
    // An order to cancel at the deadline was not answered in time. Meanwhile no bytes go out that
    // start the destination's VM.
    let mut is_cancelling = false;
    loop {
        match running.recv_timeout(ASK) {
            Ok(Message::Notice(text)) => bar.note(&text),
            Ok(Message::Ended(result)) => {
                bar.done();
                return result;
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(RelayError::SourceEnded),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if let Some(feed) = &feed {
            feed.tell(&handle, monitor.answers);
        }
        match stop.pass_on(qmp, &handle, |text| bar.note(text)) {
            Passed::On => {}
            Passed::Later(wait) => {
                monitor.answers = wait == Cancel::UnderWay;
                if wait == Cancel::Lost {
                    // Connects again, for the next look at the interrupt.
                    let _ = monitor.ask(qmp, |text| bar.note(text));
                }
                continue;
            }
        }
        let asked = stop.is_asked();
        let info = monitor.ask(qmp, |text| bar.note(text));
        let progress = handle.progress();
        if let Some(info) = &info {
            // platen has not switched this capability on, and its user may have a reason for it.
            if info.status() == HELD && !asked && !std::mem::replace(&mut told_of_hold, true) {
                bar.note(HELD_BY_QEMU);
            }
        }
        let is_late = !asked
            && match &info {
                Some(info) => {
                    ending.look(qmp, settings, (info, &progress), |text| bar.note(text))
                        | is_cancelling
                }
                None => monitor.is_lost() && ending.is_overdue(&handle),
            };
        if is_late {
            is_cancelling = cancel_late(qmp, &handle, ending, |text| bar.note(text));
            monitor.answers &= !is_cancelling;
        }
        if let Some(info) = &info {
            // QEMU gave up before it connected (a bad path, a device that cannot migrate). The
            // socket reports nothing then.
            if info.is_over() && info.status() != "completed" && progress.plain == 0 {
                handle.end(&format!("the source QEMU ended the migration: {}", describe(info)));
            }
        }
        bar.show(&progress, info.as_ref());
    }
}

fn describe(info: &MigrationInfo) -> String {
    info.error_desc.clone().unwrap_or_else(|| info.status().to_string())
}
