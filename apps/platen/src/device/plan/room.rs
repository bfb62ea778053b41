//! The threads of a server that use the store, which has room for a fixed number.

use super::Plan;
use crate::device::offload;
use anyhow::ensure;
use device::{DeviceOptions, OffloadOptions, FETCHERS};
use store::MAX_WORKERS;

/// The most workers of the store for the policy: idle pages, trials of dictionaries, writeback, and
/// one to spare.
const POLICY_WORKERS: usize = 4;

impl Plan<'_> {
    /// Refuses arguments with more threads than the store has room for. The store itself would
    /// refuse a thread only when it starts: the policy, or the last clients when they connect.
    /// Called for a device that begins, and for changed arguments. A server that replaces another
    /// one must not fail by this check: the machine may have got more CPUs.
    ///
    /// # Errors
    /// There are too many.
    pub(in crate::device) fn check_threads(&self) -> anyhow::Result<()> {
        let backing = self.policy.backing_dev.is_some();
        let policy = [self.policy.enabled, self.trains(), backing];
        let policy = policy.into_iter().filter(|&there| there).count();
        let own = policy + if backing { FETCHERS } else { 0 } + self.file_threads();
        let given = [
            // By default there are as many as the others leave room for.
            ("workers", self.args.workers.map_or(0, usize::from)),
            ("queues", self.queues()),
            ("connections", self.connections()),
            ("qat-threads", self.qat_threads()),
        ];
        let all = own + given.iter().map(|(_, number)| number).sum::<usize>();
        let given = given.iter().filter(|(_, number)| *number > 0);
        let given: Vec<_> = given.map(|(name, number)| format!("--{name} {number}")).collect();
        ensure!(
            all <= MAX_WORKERS,
            "{} and {own} other threads are {all} threads, but a store has room for {MAX_WORKERS}: \
             lower these numbers by {} in all",
            given.join(", "),
            all - MAX_WORKERS
        );
        Ok(())
    }

    /// Threads that share large requests. The default leaves room in the store's worker table for
    /// every other thread of the server.
    pub(super) fn workers(&self) -> usize {
        match self.args.workers {
            Some(workers) => workers.into(),
            // The queues' threads do all of a request.
            None if self.small => 0,
            None => self.default_workers(DeviceOptions::default().workers),
        }
    }

    /// The default on a machine whose CPUs are enough for `most` workers.
    fn default_workers(&self, most: usize) -> usize {
        let stranded = self.args.nbd.as_ref().map_or(0, |_| nbd::STRANDED);
        let transports = self.queues() + self.connections() + stranded + self.file_threads();
        let others = transports + FETCHERS + self.qat_threads() + POLICY_WORKERS;
        most.min(MAX_WORKERS.saturating_sub(others))
    }

    pub(super) fn queues(&self) -> usize {
        match self.disk {
            _ if !self.args.ublk => 0,
            Some((queues, _)) => queues.into(),
            None => self.ublk_options().geometry.queues.into(),
        }
    }

    /// NBD clients at a time.
    fn connections(&self) -> usize {
        self.args.nbd.as_ref().map_or(0, |_| self.args.connections.into())
    }

    fn file_threads(&self) -> usize {
        self.args.fuse.as_ref().map_or(0, |_| self.cpus.min(fuse::THREADS))
    }

    pub(super) fn qat_threads(&self) -> usize {
        if !offload::needs_drivers(self.args) {
            return 0;
        }
        self.args.qat_threads.map_or_else(|| OffloadOptions::default().threads, usize::from)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::args;
    use super::*;

    fn refusal(words: &str) -> String {
        Plan::on(64, args(words), None).unwrap().check_threads().expect_err(words).to_string()
    }

    #[test]
    fn more_threads_than_the_store_has_room_for_are_refused() {
        let all = "--ublk --queues 32 --nbd unix:/x --connections 30 --workers 32 --codec lz4";
        assert_eq!(
            refusal(all),
            "--workers 32, --queues 32, --connections 30 and 1 other threads are 95 threads, but a \
             store has room for 64: lower these numbers by 31 in all"
        );
        // Training has a thread, too.
        let refused = refusal("--ublk --queues 32 --nbd unix:/x --connections 30 --workers 1");
        let start = "--workers 1, --queues 32, --connections 30 and 2 other threads are 65 ";
        assert!(refused.starts_with(start), "{refused}");
        let qat = "--codec qatzip --qat-threads 32 --nbd unix:/x --connections 30 --workers 2";
        let refused = refusal(qat);
        assert!(refused.contains("--qat-threads 32 and 1 other threads are 65 "), "{refused}");
        // Without a device they do not run, and neither does the other transport.
        for fits in [
            &format!("{qat} --accelerator none"),
            "--nbd unix:/x --connections 30 --workers 32",
            "--ublk --queues 31 --nbd unix:/x --connections 30",
            "--ublk --queues 32 --workers 30",
        ] {
            Plan::on(64, args(fits), None).unwrap().check_threads().expect(fits);
        }
        // A backing device has threads of its own.
        let policy = Some("[policy]\nbacking_dev = \"/dev/vdb\"\n");
        let full = args("--nbd unix:/x --connections 30 --workers 32");
        let plan = Plan::on(64, full, policy).unwrap();
        let refused = plan.check_threads().unwrap_err().to_string();
        assert!(refused.contains("and 7 other threads are 69 threads"), "{refused}");
    }

    #[test]
    fn the_default_leaves_room_for_all_others_on_any_machine() {
        for queues in 1..=32 {
            for connections in 1..=30 {
                let words =
                    format!("--ublk --queues {queues} --nbd unix:/x --connections {connections}");
                let plan = Plan::on(64, args(&words), None).unwrap();
                plan.check_threads().expect(&words);
                let workers = plan.default_workers(32);
                let all = workers + queues + connections + nbd::STRANDED + FETCHERS;
                assert!(workers == 0 || all + POLICY_WORKERS <= MAX_WORKERS, "{words}: {workers}");
                assert_eq!(plan.default_workers(3), workers.min(3));
            }
        }
        // Of the queues there are as many as CPUs.
        let words = "--ublk --queues 32 --nbd unix:/x --connections 30 --workers 30";
        Plan::on(2, args(words), None).unwrap().check_threads().unwrap();
        let plan = Plan::on(64, args("--nbd unix:/x"), None).unwrap();
        assert_eq!(plan.default_workers(32), 32);
    }

    /// CPUs were taken offline: the disk keeps its queues.
    #[test]
    fn a_server_has_memory_and_threads_for_the_queues_of_the_disk_that_it_takes_over() {
        let args = args("--ublk --buffers 64M");
        let [then, mut now] = [8, 1].map(|cpus| Plan::on(cpus, args, None).unwrap());
        let ublk::Geometry { queues, depth, max_io, .. } = then.ublk_options().geometry;
        let state = ublk::DiskState::Quiesced;
        now.take_over(&ublk::Info { id: 3, queues, depth, max_io, state, pid: 9, mark: 0 });
        assert_eq!((now.queues(), now.threads(None)), (8, then.threads(None)));
        assert_eq!(now.heap(None), then.heap(None));
    }
}
