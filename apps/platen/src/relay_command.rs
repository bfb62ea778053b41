//! `platen relay`: the source end alone, for libvirt and scripts.

use crate::args::RelayArgs;
use crate::report::Report;
use crate::report_file::check_file;
use crate::say::say;
use crate::seed::OFFERS;
use crate::source_end::{listen, Measure, Plan, UNCONFIRMED};
use crate::{interrupt, leave};
use anyhow::Context;
use relay::{RelayError, Source, SourceEnd, SourceHandle};
use session::{SessionError, Setup};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) fn run(args: &RelayArgs) -> anyhow::Result<ExitCode> {
    args.source.refuse_explain()?;
    check_file(args.source.json.as_deref())?;
    let setup = args.channels.map(|channels| Setup { channels, ..Setup::with_return_path() });
    let plan = Plan::new(&args.source, &args.connect, setup)?;
    let listening = listen(&args.listen)?;
    // `None` while there is no session to end on an interrupt.
    let running = Arc::new(Mutex::new(None));
    let stopped = Arc::new(AtomicBool::new(false));
    let (interrupted, stops) = (running.clone(), stopped.clone());
    ctrlc::set_handler(move || {
        interrupt::end_if_done();
        match &*lock(&interrupted) {
            Some(handle) => {
                // The relay may have ended already, and be about to connect again.
                stops.store(true, Ordering::Release);
                SourceHandle::stop(handle);
            }
            None => leave::now(1),
        }
    })
    .context("cannot handle signals")?;
    let peer = &args.source.peer;
    let mut again = false;
    loop {
        let source = plan.connect(&listening, |source| {
            *lock(&running) = Some(source.handle());
            // QEMU may connect already: the pages that it sent before would cross.
            source.await_seed(OFFERS, || !stopped.load(Ordering::Acquire));
        })?;
        if again {
            say(&format!("connected to {peer} again"));
        } else {
            say(&format!("listening on {} for QEMU, peer {peer}", args.listen));
        }
        let measure = Measure::begin(plan.settings);
        let result = source.run(say, || measure.for_peer(&source));
        // The handler holds the lock, too: a stop is seen here, or ends the process.
        let mut handle = lock(&running);
        let lost = receiver_gone(&source, &result).filter(|_| !stopped.load(Ordering::Acquire));
        let Some(lost) = lost else {
            drop(handle);
            let has_moved = result.as_ref().is_ok_and(|end| end.return_path);
            let code = finish(args, measure.report(&source), result)?;
            if has_moved {
                interrupt::end_at_once();
                // The next migration must find no socket at which nobody accepts it.
                *lock(&running) = None;
                drop((source, listening));
                plan.write_seed(args.source.name.as_deref());
            }
            return Ok(code);
        };
        *handle = None;
        drop(handle);
        say(&format!("{lost}; connecting again"));
        again = true;
    }
}

type Running = Mutex<Option<SourceHandle>>;

fn lock(handle: &Running) -> MutexGuard<'_, Option<SourceHandle>> {
    handle.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why the relay has no session any more, if that ended while the relay waited for its migration.
fn receiver_gone(source: &Source, result: &Result<SourceEnd, RelayError>) -> Option<String> {
    let error = match result {
        Err(RelayError::Ended(error)) if !source.has_begun() => error,
        _ => return None,
    };
    match **error {
        // The receiver is there, and says why.
        SessionError::Over { .. } => Some(format!("{error}; no migration had begun")),
        SessionError::LinkLost { .. }
        | SessionError::NotResumed { .. }
        | SessionError::Refused { .. } => {
            Some(format!("the receiver has gone before a migration began ({error})"))
        }
        _ => None,
    }
}

/// Reports the result.
fn finish(
    args: &RelayArgs,
    mut report: Report,
    result: Result<SourceEnd, RelayError>,
) -> anyhow::Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    match &result {
        Ok(end) => {
            report.status = "completed".into();
            report.set_end(end);
            if !end.return_path {
                report.status = "unconfirmed".into();
                code = ExitCode::from(UNCONFIRMED);
                say("the destination QEMU was given the whole stream, but the source QEMU used no return path: no \
                     relay knows whether the destination runs the VM, and the source QEMU calls the migration \
                     completed. Look at the destination, and turn the capability return-path on next time");
            }
        }
        Err(error) => {
            report.status = "failed".into();
            report.error = Some(error.to_string());
        }
    }
    report.publish(args.source.json.as_deref());
    result.map(|_| code).map_err(Into::into)
}
