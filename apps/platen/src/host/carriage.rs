//! Parts of a carrier that both ends of a migration and forwarded connections share.

use super::journal::say_of;
use super::settings::Settings;
use crate::seed::Departure;
use host::{Carrier, Record, Status};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use turns::Turns;

/// Interval of a migration's progress reports to services.
const PROGRESS: Duration = Duration::from_millis(200);

/// How a migration has ended.
pub(super) struct Outcome {
    pub(super) status: Status,
    /// Why, unless it completed.
    pub(super) cause: Option<String>,
    /// The seed to write when the outcome is known to the service.
    pub(super) departure: Option<Departure>,
}

impl Outcome {
    pub(super) fn new(status: Status, cause: Option<String>) -> Self {
        Self { status, cause, departure: None }
    }

    pub(super) fn failed(cause: impl Into<String>) -> Self {
        Self::new(Status::Failed, Some(cause.into()))
    }
}

/// Ends the migration. A signal by which the user ends this process calls it.
pub(super) type Stop = Box<dyn Fn() + Send>;

/// The migration of this process, for signals and messages.
pub(super) struct Carriage {
    pub(super) settings: Settings,
    pub(super) carrier: Arc<Carrier>,
    pub(super) stop: Arc<Mutex<Option<Stop>>>,
    /// The turns among the other migrations that leave this host.
    pub(super) turns: Option<Arc<Turns>>,
}

impl Carriage {
    /// Shows a message to the user.
    pub(super) fn say(&self, text: &str) {
        let record = self.carrier.record();
        say_of(&record, &format!("{}: {text}", record.title()));
    }

    /// Sets what a signal to end does.
    pub(super) fn stop_by(&self, stop: impl Fn() + Send + 'static) {
        *self.stop.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(stop));
    }

    /// Runs `body`; meanwhile services get the changes of `progress` every 200 ms.
    pub(super) fn while_telling<T>(
        &self,
        progress: impl Fn(&mut Record) + Sync,
        body: impl FnOnce() -> T,
    ) -> T {
        let (done, over) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let progress = &progress;
            scope.spawn(move || {
                while let Err(mpsc::RecvTimeoutError::Timeout) = over.recv_timeout(PROGRESS) {
                    self.carrier.update(progress);
                }
                self.carrier.update(progress);
            });
            let result = body();
            drop(done);
            result
        })
    }
}
