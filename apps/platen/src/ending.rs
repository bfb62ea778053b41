//! How and when `migrate` ends a migration: the controller of crate `converge` between QEMU's
//! monitor and the relay.

use crate::ending_options::{EndingOptions, Throttle, LONGEST};
use crate::settings::Before;
use anyhow::Context;
use converge::{Action, Controller, Decision, Limits, Phase, Sample, Switchover, Why};
use qmp::{MigrationInfo, Qmp, QmpError};
use relay::{Progress, SourceHandle};
use serde_json::{json, Map, Value};
use std::time::{Duration, Instant};

/// QEMU's parameter from 8.2 on.
const BANDWIDTH: &str = "avail-switchover-bandwidth";
const DOWNTIME: &str = "downtime-limit";
/// The end of one migration.
#[derive(Debug)]
pub(crate) struct Ending {
    controller: Controller,
    has_bandwidth: bool,
    deadline: Option<Duration>,
    /// Whether QEMU was asked to turn to postcopy, and has not refused, or was seen there.
    is_postcopy: bool,
    /// Whether [`Ending::is_overdue`] has said so.
    was_overdue: bool,
    begun: Instant,
    explain: bool,
    /// Why the migration did not converge, if that was found.
    pub(crate) not_converging: Option<String>,
    /// The most by which the guest was slowed, per cent.
    pub(crate) throttle: u8,
    /// The reason why the migration was cancelled, if it was.
    pub(crate) cancelled: Option<String>,
}

impl Ending {
    /// Prepares QEMU for the migration.
    pub(crate) fn prepare(
        options: &EndingOptions,
        explain: bool,
        qmp: &mut Qmp,
        settings: &mut Before,
    ) -> anyhow::Result<Self> {
        let parameters = qmp.query_parameters()?;
        let has_bandwidth = parameters.get(BANDWIDTH).is_some();
        let there =
            parameters[DOWNTIME].as_u64().context("QEMU has no parameter downtime-limit")?;
        let max = options.max_downtime.unwrap_or(there);
        let limits = Limits {
            max_downtime: Duration::from_millis(max),
            deadline: options.deadline.map(Duration::from_secs),
            throttle: options.throttle == Throttle::Auto,
            postcopy: options.postcopy()?,
        };
        if limits.throttle {
            // The capability cannot be switched on during a migration. With these settings it has
            // no effect until the controller wants one.
            let gently = json!({
                "throttle-trigger-threshold": 100,
                "cpu-throttle-initial": 1,
                "cpu-throttle-increment": 1,
                "max-cpu-throttle": 1,
            });
            settings.set_parameters(qmp, map(gently))?;
        }
        let mut ending = Self {
            controller: Controller::new(limits, Duration::from_millis(there), has_bandwidth),
            has_bandwidth,
            deadline: limits.deadline,
            is_postcopy: false,
            was_overdue: false,
            begun: Instant::now(),
            explain,
            not_converging: None,
            throttle: 0,
            cancelled: None,
        };
        // QEMU may stop the VM before the first observation, by its own limit and bandwidth.
        let held = ending.controller.held();
        settings.set_parameters(qmp, ending.parameters(held))?;
        Ok(ending)
    }

    /// Records that QEMU's migration begins now.
    pub(crate) fn begin(&mut self) {
        self.begun = Instant::now();
    }

    /// The longest downtime allowed.
    pub(crate) fn max_downtime(&self) -> Duration {
        self.controller.max_downtime()
    }

    /// Observes the migration and acts on it. `note` shows a message. Returns true if the migration
    /// is to be cancelled.
    pub(crate) fn look(
        &mut self,
        qmp: &mut Qmp,
        settings: &mut Before,
        (info, progress): (&MigrationInfo, &Progress),
        note: impl Fn(&str),
    ) -> bool {
        let phase = Phase::of(info.status());
        self.is_postcopy |= phase == Phase::Postcopy;
        // A QEMU that hands over answers nothing.
        let parameters = match phase {
            Phase::Precopy => qmp.query_parameters().unwrap_or_default(),
            _ => Value::Null,
        };
        let sample = self.sample(phase, info, progress, &parameters);
        self.throttle = self.throttle.max(sample.throttle);
        let step = self.controller.step(&sample);
        for decision in &step.decisions {
            self.report(decision, &note);
        }
        let mut cancel = false;
        for action in step.actions {
            let done = match action {
                Action::StopAt(wanted) => {
                    let set = self.stop_at(wanted, qmp, settings, &parameters[DOWNTIME]);
                    if let Ok(false) = set {
                        self.controller.not_done(action);
                    }
                    set.map(drop)
                }
                Action::Throttle(percent) => settings.set_parameters(qmp, throttle(percent)),
                Action::StartPostcopy => {
                    self.is_postcopy = true;
                    qmp.migrate_start_postcopy().map_err(Into::into)
                }
                Action::Cancel => {
                    cancel = true;
                    Ok(())
                }
            };
            if let Err(error) = done {
                let is_refused =
                    matches!(error.downcast_ref::<QmpError>(), Some(QmpError::Refused { .. }));
                if action == Action::StartPostcopy && is_refused {
                    self.is_postcopy = false;
                }
                if is_unanswered(&error) {
                    self.controller.unanswered(action);
                } else {
                    self.controller.not_done(action);
                }
                // QEMU hands over at this moment, or has ended: its own status shows which.
                if self.explain || action == Action::StartPostcopy {
                    note(&format!("{error:#}"));
                }
            }
        }
        cancel
    }

    /// Records that QEMU does not answer, so that nobody knows whether the migration can still be
    /// cancelled: the next observation asks for it again.
    pub(crate) fn cancel_later(&mut self) {
        self.cancelled = None;
        self.controller.unanswered(Action::Cancel);
    }

    /// Whether the migration is to be cancelled although its monitor has closed, so that nobody
    /// knows its status: the deadline has passed. Says so once. The migration of a source that may
    /// have turned to postcopy goes on, whoever ordered that: an end of its relay could leave the
    /// VM at neither host.
    pub(crate) fn is_overdue(&mut self, handle: &SourceHandle) -> bool {
        let late = self.deadline.filter(|after| self.begun.elapsed() >= *after);
        let may_be_postcopy = || self.is_postcopy || handle.may_turn_to_postcopy();
        let late = late.filter(|_| !self.was_overdue && !may_be_postcopy());
        let Some(after) = late else { return false };
        self.was_overdue = true;
        self.cancelled = Some(not_over(after));
        true
    }

    /// Sets the threshold at which QEMU stops the VM. Returns false if another client has set its
    /// downtime-limit since it was `seen`: the next observation adopts that limit.
    fn stop_at(
        &self,
        wanted: Switchover,
        qmp: &mut Qmp,
        settings: &mut Before,
        seen: &Value,
    ) -> anyhow::Result<bool> {
        if qmp.query_parameters()?[DOWNTIME] != *seen {
            return Ok(false);
        }
        settings.set_parameters(qmp, self.parameters(wanted)).map(|()| true)
    }

    fn report(&mut self, decision: &Decision, note: impl Fn(&str)) {
        let text = decision.to_string();
        let is_for_all = match &decision.why {
            Why::Stuck(stuck) => {
                self.not_converging = Some(stuck.to_string());
                true
            }
            Why::Deadline { after } => {
                self.cancelled = Some(not_over(*after));
                true
            }
            Why::TooLate { .. }
            | Why::PostcopyAfter { .. }
            | Why::PostcopyNeeded(_)
            | Why::Throttled { .. }
            | Why::LimitChanged { .. } => true,
            _ => false,
        };
        if is_for_all || self.explain {
            note(&text);
        }
    }

    fn sample(
        &self,
        phase: Phase,
        info: &MigrationInfo,
        progress: &Progress,
        parameters: &Value,
    ) -> Sample {
        let ram = info.ram.clone().unwrap_or_default();
        let page = ram.page_size.unwrap_or(4096);
        let pages = |count: Option<u64>| count.unwrap_or(0).saturating_mul(page);
        let (data, zeros) = (pages(ram.normal), pages(ram.duplicate));
        let rate = |pages: u64| pages as f64 * page as f64;
        Sample {
            at: self.begun.elapsed(),
            phase,
            total: ram.total.unwrap_or(0),
            remaining: ram.remaining.unwrap_or(0),
            syncs: ram.dirty_sync_count.unwrap_or(0),
            sent: data.saturating_add(zeros),
            data,
            drain: progress.drain,
            wire: progress.transferred,
            dirty_rate: ram.dirty_pages_rate.filter(|pages| *pages > 0).map(rate),
            bandwidth: ram.mbps.map(|mbps| mbps * 1e6 / 8.0),
            delay: progress.delay,
            throttle: info
                .cpu_throttle_percentage
                .map_or(0, |percent| u8::try_from(percent).unwrap_or(u8::MAX)),
            downtime_limit: parameters[DOWNTIME].as_u64().map(Duration::from_millis),
            max_bandwidth: parameters["max-bandwidth"].as_u64(),
        }
    }

    fn parameters(&self, wanted: Switchover) -> Map<String, Value> {
        let limit = u64::try_from(wanted.downtime_limit.as_millis()).unwrap_or(LONGEST);
        let mut parameters = map(json!({ DOWNTIME: limit }));
        if self.has_bandwidth {
            parameters.insert(BANDWIDTH.into(), json!(wanted.bandwidth.unwrap_or(0)));
        }
        parameters
    }
}

fn not_over(after: Duration) -> String {
    format!("not over after {} s", after.as_secs())
}

/// QEMU slows the guest by `percent` at its next second look at the dirty log, whatever is dirty.
fn throttle(percent: u8) -> Map<String, Value> {
    map(json!({
        "throttle-trigger-threshold": 1,
        "cpu-throttle-increment": percent.clamp(1, 99),
        "max-cpu-throttle": percent.clamp(1, 99),
    }))
}

/// Whether QEMU has not answered an order in time. It may carry it out later; a question that it
/// has not answered came before the order.
fn is_unanswered(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<QmpError>();
    matches!(error, Some(QmpError::TimedOut { command, .. }) if !command.starts_with("query-"))
}

fn map(object: Value) -> Map<String, Value> {
    match object {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
