//! The outcome of a migration: what it left as in doubt, why it failed, and where its VM is.

use super::super::child::Migration;
use super::super::domain;
use super::super::entry::Way;
use super::super::patience::SILENCE;
use super::super::report::Outcome;
use super::super::verdict::verdict;
use super::{Drive, State, LOOK};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Instant;

impl Drive<'_> {
    /// Reports a migration whose source does not answer as in doubt, and goes on with the others.
    /// Its process gets no signal: a first one is for the interrupt, and a second one would force
    /// the end.
    pub(super) fn leave(&mut self, vm: usize, migration: Migration) -> State {
        let (source, program) = match self.turns[vm].entry.way {
            Way::Monitor { .. } => ("its source QEMU's monitor", "platen migrate"),
            Way::Domain => ("libvirt", "virsh migrate"),
        };
        let (silence, id) = (SILENCE.as_secs(), migration.id());
        let text = if self.is_interrupted {
            format!(
                "interrupted, but {source} has not answered for {silence} s: its {program} \
                 (process {id}) goes on, and cancels when it can. {LOOK}"
            )
        } else {
            format!(
                "{source} has not answered for {silence} s, and nothing was sent: its {program} \
                 (process {id}) goes on, and completes the migration when it can. {LOOK}"
            )
        };
        self.go_on_without(vm, migration, text)
    }

    /// Reports a VM that may be at the other host, and whose migration waits, after an interrupt.
    /// Its process goes on: only a person who has looked there can tell where the VM is to run.
    pub(super) fn leave_in_doubt(&mut self, vm: usize, migration: Migration) -> State {
        let id = migration.id();
        let text = format!(
            "interrupted, but the other host may have the VM: its platen migrate (process {id}) goes \
             on. {LOOK}"
        );
        self.go_on_without(vm, migration, text)
    }

    fn go_on_without(&mut self, vm: usize, migration: Migration, text: String) -> State {
        self.schedule.ended(vm, self.begun.elapsed());
        self.end(vm, Outcome::InDoubt, Some(text));
        State::Left(migration)
    }

    /// The duration of a migration that has ended at `at`, ms.
    pub(super) fn took(&self, vm: usize, at: Instant) -> Option<u64> {
        let at = u64::try_from(at.saturating_duration_since(self.begun).as_millis()).ok()?;
        Some(at.saturating_sub(self.turns[vm].report.started?))
    }

    /// Why a migration has failed.
    pub(super) fn cause(&self, vm: usize, status: ExitStatus, error: &serde_json::Value) -> String {
        let said = &self.said[vm];
        let program = match self.turns[vm].entry.way {
            Way::Monitor { .. } => "platen migrate",
            Way::Domain => "virsh migrate",
        };
        match (status.signal(), error.as_str()) {
            (Some(signal), _) => format!("its {program} was ended by signal {signal}"),
            _ if !said.is_empty() => said.clone(),
            (None, Some(error)) => error.to_owned(),
            (None, None) => format!("its {program} ended with {status}"),
        }
    }

    /// Asks the source QEMU where the VM is, on a thread, so that the others continue.
    pub(super) fn ask(&mut self, vm: usize) {
        let turn = &self.turns[vm];
        let (entry, before) = (turn.entry.clone(), turn.found.state.clone());
        let verdicts = self.verdicts.clone();
        let body = move || {
            let (outcome, text) = match &entry.way {
                Way::Monitor { monitor, .. } => verdict(monitor, &before),
                Way::Domain => domain::verdict(&entry.name, &before),
            };
            let _ = verdicts.send((vm, outcome, text));
        };
        if let Err(error) = std::thread::Builder::new().name("verdict".into()).spawn(body) {
            let text = format!("cannot start a thread to ask its source QEMU: {error}");
            let _ = self.verdicts.send((vm, Outcome::InDoubt, text));
        }
    }
}
