//! The end of carriers, and the records of the migrations that have ended.

use super::records::{read_record, socket_of, write_record};
use super::Registry;
use crate::error::HostError;
use crate::record::{now, Phase, Record, Status};
use std::fs;

/// The number of records of ended migrations that are stored.
const HISTORY: usize = 100;

impl Registry {
    /// Records that a carrier has gone, in order or not.
    pub(super) fn gone(&self, id: &str) {
        let Some(known) = self.lock().remove(id) else { return };
        match read_record(&self.folder.join(format!("{id}.json"))) {
            Some(record) if record.phase == Phase::Ended => {
                self.watcher.changed(Some(&known.record), &record);
            }
            // The carrier could not write its record.
            _ if known.record.phase == Phase::Ended => {
                let _ = write_record(&self.folder, &known.record);
                self.watcher.changed(Some(&known.record), &known.record);
            }
            _ => self.bury(&known.record),
        }
        self.prune();
    }

    /// Records the end of a carrier that is not there any more. It may have ended in order since
    /// its record was read: its own record of the end stays.
    pub(super) fn bury_unless_ended(&self, found: &Record) {
        if !self.has_ended(&found.id) {
            self.bury(found);
        }
    }

    /// Whether a carrier has recorded the end of its migration.
    pub(super) fn has_ended(&self, id: &str) -> bool {
        let last = read_record(&self.folder.join(format!("{id}.json")));
        last.is_some_and(|last| last.phase == Phase::Ended)
    }

    /// Records the end of a carrier that could not do so itself.
    fn bury(&self, found: &Record) {
        let cause = "the process that carried it was killed: look at both hosts for the VM";
        let record = Record {
            phase: Phase::Ended,
            ended: Some(now()),
            status: Some(Status::Failed),
            cause: Some(cause.into()),
            ..found.clone()
        };
        let _ = fs::remove_file(socket_of(&self.folder, &record.id));
        let _ = write_record(&self.folder, &record);
        self.watcher.changed(Some(found), &record);
    }

    /// The last migrations that have ended, in the order of their begin.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn history(&self) -> Result<Vec<Record>, HostError> {
        let mut all = self.stored()?;
        all.retain(|record| record.phase == Phase::Ended);
        let surplus = all.len().saturating_sub(HISTORY);
        Ok(all.split_off(surplus))
    }

    /// All records in the folder, in the order of their begin.
    pub(super) fn stored(&self) -> Result<Vec<Record>, HostError> {
        let failed = || HostError::system(format!("cannot read {}", self.folder.display()));
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(failed())? {
            let path = entry.map_err(failed())?.path();
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            if path.extension().is_some_and(|end| end == "json") && !name.starts_with('.') {
                // The file's name is used for sorting and for removal.
                all.extend(read_record(&path).map(|record| Record { id: name, ..record }));
            }
        }
        all.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(all)
    }

    /// Removes the oldest records.
    pub(super) fn prune(&self) {
        let Ok(mut all) = self.stored() else { return };
        all.retain(|record| record.phase == Phase::Ended);
        let surplus = all.len().saturating_sub(HISTORY);
        for record in &all[..surplus] {
            let _ = fs::remove_file(self.folder.join(format!("{}.json", record.id)));
        }
    }
}
