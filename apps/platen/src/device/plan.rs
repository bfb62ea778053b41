//! The arguments of `platen device serve` resolved to sizes, threads and memory. Supervisor and
//! server both compute them here, so they agree.

mod memory;
mod room;

use super::args::ServeArgs;
use super::offload;
use crate::say::STACK;
use crate::size::Size;
use anyhow::{ensure, Context};
use codec::{Codec, Dictionary, Settings};
use device::{DeviceOptions, FETCHERS, PAGE};
use memory::Memory;
use std::path::Path;
use std::thread::available_parallelism;
use std::time::Duration;

/// Heap of a server, without its request threads and the policy: twice what it uses when idle
/// (mallinfo), because answers to `stat` come on top.
const BASE_HEAP: usize = 3 << 17;

/// Heap of a backing device, beside writeback's: buffers of waiting requests.
const BACKING_HEAP: usize = 9 << 18;

/// Threads of a server other than those for requests and the small ones: keeper, policy and its
/// start, watch, control, supervisor, signals.
const BASE_THREADS: usize = 7;

/// The thread that watches the backing device.
const BACKING_THREADS: usize = 1;

/// Divisor of the memory limit: at most an eighth holds incompressible pages while a host that
/// swaps is short of memory, unless the policy writes them to a backing device.
const WHOLE_PART: u64 = 8;

/// The checked arguments and the values derived from them.
pub(super) struct Plan<'a> {
    pub(super) args: &'a ServeArgs,
    /// Pages of the device.
    pub(super) pages: u64,
    /// Codec and level of new pages.
    pub(super) codec: Settings,
    pub(super) policy: policy::Settings,
    /// CPUs of this machine that this process may use.
    cpus: usize,
    /// Memory that this process may use.
    memory: Memory,
    /// Whether the defaults are those that take less memory.
    small: bool,
    /// Queues of the existing ublk disk that this server takes over, and requests of each: the
    /// machine may have had more CPUs or memory when the disk was made.
    disk: Option<(u16, u16)>,
}

impl<'a> Plan<'a> {
    /// Checks and resolves `args`. `policy` is the text of the file that --policy names.
    ///
    /// # Errors
    /// An argument is out of its range, or contradicts another.
    pub(super) fn new(args: &'a ServeArgs, policy: Option<&str>) -> anyhow::Result<Self> {
        Self::on(available_parallelism().map_or(1, usize::from), args, policy)
    }

    /// As [`new`](Self::new), on a machine with this number of CPUs.
    fn on(cpus: usize, args: &'a ServeArgs, policy: Option<&str>) -> anyhow::Result<Self> {
        Self::within(Memory::own(), cpus, args, policy)
    }

    /// As [`on`](Self::on), with this memory.
    fn within(
        memory: Memory,
        cpus: usize,
        args: &'a ServeArgs,
        policy: Option<&str>,
    ) -> anyhow::Result<Self> {
        let pages = pages(args.size)?;
        let codec = Settings::new(args.codec, args.level)?;
        offload::check(args)?;
        let small = args.swap && memory.is_small();
        let defaults = if small { policy::Settings::small() } else { policy::Settings::default() };
        let policy = match policy {
            None => defaults,
            Some(text) => {
                let name = args.policy.as_deref().unwrap_or(Path::new("policy")).display();
                policy::Settings::read_over(text, &defaults).with_context(|| name.to_string())?
            }
        };
        Ok(Self { args, pages, codec, policy, cpus, memory, small, disk: None })
    }

    /// Plans for the queues of the ublk disk that this server takes over.
    pub(super) fn take_over(&mut self, disk: &ublk::Info) {
        self.disk = Some((disk.queues, disk.depth));
    }

    /// Whether dictionaries are trained, provided there is a supervisor.
    ///
    /// Training is safe even while the host swaps to the device, because nothing waits for the
    /// trainer. The trainer may wait for memory, and so for this very device, without end. The
    /// server does not wait for its answer and shares no lock with it (`policy/channel.rs`). The
    /// supervisor starts it while memory is not short, like every other process, and does not wait
    /// for its end. The OOM killer kills it first; its memory is limited and not locked, and all of
    /// it is free when it exits.
    pub(super) fn trains(&self) -> bool {
        self.args.codec == Codec::Zstd && self.policy.trains()
    }

    /// Connections of the kernel's NBD client: one for each CPU that may submit requests at once.
    pub(super) fn swap_connections(&self) -> usize {
        let most = if self.small { 1 } else { 4 };
        self.cpus.min(most).min(usize::from(self.args.connections))
    }

    pub(super) fn store_options(&self) -> store::Options {
        let mut options = store::Options::default();
        let limit = match self.args.mem_limit {
            Some(Size(limit)) => Some(limit),
            None => self.memory.default_limit(self.args.swap),
        };
        options.mem_limit = limit.unwrap_or(options.mem_limit);
        options.grow_to = self.pages;
        if self.args.swap {
            options.whole_part = WHOLE_PART;
        }
        match (self.args.reserve, self.args.swap) {
            (Some(Size(reserve)), _) => options.reserve = reserve,
            (None, true) => options.reserve = self.memory.share(16, 8 << 20, 512 << 20),
            (None, false) => options.reserve = options.reserve.min(self.memory.cgroup() / 16),
        }
        if self.args.swap {
            // The kernel tries another page when one cannot be written, and reads wait behind the
            // write. This is time in which the kernel finds no memory, on a machine of any speed.
            options.patience = Duration::from_millis(50);
        }
        options
    }

    /// The options of the device. `dictionaries` tells whether the device reserves room for trained
    /// dictionaries.
    pub(super) fn device_options(&self, dictionaries: bool) -> DeviceOptions {
        let mut options =
            DeviceOptions { settings: self.codec, dictionaries, ..DeviceOptions::default() };
        options.workers = self.workers();
        options
    }

    pub(super) fn nbd_options(&self) -> nbd::ServerOptions {
        nbd::ServerOptions {
            name: self.args.name.clone(),
            connections: usize::from(self.args.connections),
            check_memory: !self.args.swap,
            compact: self.small,
            ..nbd::ServerOptions::default()
        }
    }

    pub(super) fn ublk_options(&self) -> ublk::Options {
        let budget = match self.args.buffers {
            Some(Size(budget)) => budget,
            // 8 requests of 16 KiB a queue with 256 MiB of memory.
            None if self.small => self.memory.share(512, 256 << 10, 2 << 20),
            None => self.memory.share(128, 1 << 20, 256 << 20),
        };
        let queues = self.args.queues.or(self.small.then_some(2));
        let mut options = ublk::Options::on(self.cpus, self.pages, queues, budget);
        // A command that takes longer has hit a kernel defect: report an error to the user.
        options.timeout = Duration::from_secs(60);
        options
    }

    /// Bytes of heap that a server may need. A stand-by server has them in advance. `backing_table`
    /// is the size in bytes of the server's table of the backing device, if there is one.
    pub(super) fn heap(&self, backing_table: Option<usize>) -> usize {
        let (heap, fetchers) = match backing_table {
            Some(table) => {
                (BACKING_HEAP + policy::writeback_memory(&self.policy) + table, FETCHERS)
            }
            None => (0, 0),
        };
        let all = self.compressing(fetchers);
        let requests = all * device::thread_heap(self.codec) + self.buffers_heap();
        let dictionaries = match self.trains() {
            true => dictionary_heap(self.codec.level(), all),
            false => 0,
        };
        // It frees memory when memory is short.
        let policy = policy::memory(&self.policy, self.trains().then_some(self.codec));
        BASE_HEAP + policy + requests + heap + dictionaries
    }

    /// Threads of a server but the [small ones](Self::small_stacks), for which a stand-by server
    /// has the stacks in advance.
    pub(super) fn threads(&self, backing_table: Option<usize>) -> usize {
        let (threads, fetchers) = match backing_table {
            Some(_) => (BACKING_THREADS, FETCHERS),
            None => (0, 0),
        };
        // One connects the kernel's NBD client again.
        let client = usize::from(self.args.nbd.is_some() && self.args.swap);
        let metrics = usize::from(self.args.prometheus.is_some());
        BASE_THREADS + self.compressing(fetchers) + client + metrics + threads
    }

    /// The stacks of the threads that look at files and write the log, in bytes.
    pub(super) fn small_stacks() -> Vec<usize> {
        vec![STACK; 1 + usize::from(crate::say::goes_to_a_file())]
    }

    /// Heap of the transports for requests. The buffers of ublk are the supervisor's.
    fn buffers_heap(&self) -> usize {
        if self.args.ublk {
            // Notes about each request, and a queue's own state. The disk of an earlier version,
            // which had at least 16 requests, may be taken over.
            let depth = self.disk.map_or(self.ublk_options().geometry.depth.max(16), |disk| disk.1);
            self.queues() * (usize::from(depth) * 256 + (16 << 10))
        } else {
            self.swap_connections() * nbd::connection_memory(self.small)
        }
    }

    /// Threads of a server that compress, but the policy's.
    fn compressing(&self, fetchers: usize) -> usize {
        let args = self.args;
        let connections = match (&args.nbd, args.swap) {
            (None, _) => 0,
            (Some(_), false) => usize::from(args.connections),
            (Some(_), true) => self.swap_connections(),
        };
        self.workers() + self.queues() + connections + fetchers + self.qat_threads()
    }
}

fn pages(Size(size): Size) -> anyhow::Result<u64> {
    let page = PAGE as u64;
    ensure!(
        size > 0 && size.is_multiple_of(page),
        "--size: {size} bytes are no whole number of pages of {page} bytes, 1 or more"
    );
    let most = store::max_pages() * page;
    ensure!(
        size <= most,
        "--size: {size} bytes are more than a device can have, {most} ({})",
        Size(most)
    );
    Ok(size / page)
}

/// Heap for dictionaries of this level: the tables of the maximum number, and a context for each
/// thread that compresses.
fn dictionary_heap(level: i32, threads: usize) -> usize {
    let tables = store::DICTIONARIES * Dictionary::memory_for(Some(level));
    tables + threads * Dictionary::context_memory(level)
}

#[cfg(test)]
pub(super) mod tests;
