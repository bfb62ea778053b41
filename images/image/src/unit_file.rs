//! A file of units that is being written: encodes units on threads and appends them in order.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use codec::{checksum, Codec, Settings};
use pages::{Arena, Slot};
use pipeline::{Pool, PoolConfig, Popped, Reorder, Results};
use qat::{watched, Counters, Watchdog};
use twox_hash::xxhash3_128::Hasher;

use crate::adapt::Adapt;
use crate::compress::{room, Context, Encode, Encoded};
use crate::file::NewFile;
use crate::layout::{header, Form, Part, Trailer, TRAILER_LEN};
use crate::writeback::Writeback;
use crate::{Options, Shape, UnitEntry, WriteError};

/// Units that may be filled at once.
const FILLING: usize = 2;

/// The pause between two calls of the watchdog, which looks once a second.
const PAUSE: Duration = Duration::from_millis(250);
/// How long threads with a device may take to end: a call of its library may never return.
const THREADS_END: Duration = Duration::from_secs(5);

/// The threads that encode units, and their buffers.
pub(crate) struct UnitFile {
    out: Sealing,
    pool: Arc<Pool<Encode>>,
    results: Arc<Results<Encoded>>,
    order: Reorder<Encoded>,
    plain: Arc<Arena>,
    stored: Arc<Arena>,
    /// Units submitted so far, those of the files before this one included, and their number.
    submitted: u64,
    before: u64,
    units: Vec<UnitEntry>,
    settings: Settings,
    adapt: Option<Adapt>,
    accelerators: Vec<Arc<Counters>>,
    /// With accelerators: finds a thread that never returns from a call of their library.
    watchdog: Option<Watchdog>,
}

impl UnitFile {
    /// Begins a file; `path` is for errors.
    pub(crate) fn new(new: NewFile, path: &Path, options: Options) -> Result<Self, WriteError> {
        let Options { settings, unit_bytes, device, .. } = options;
        let threads = options.threads.max(1);
        let required = device.clone();
        let make = move || {
            let context = |_| Context::new(settings, unit_bytes, device.as_ref());
            (0..threads).map(context).collect::<Result<Vec<_>, _>>()
        };
        let mut contexts = if required.is_some() { watched(make)?? } else { make()? };
        let on_device: Vec<bool> = contexts.iter().filter_map(Context::on_device).collect();
        if let Some(qat) = required.filter(|_| !on_device.is_empty()) {
            qat.check_engines(on_device.contains(&true))?;
        }
        let accelerators: Vec<_> = contexts.iter().filter_map(Context::accelerator).collect();
        let config = PoolConfig { threads, name: "image", ..PoolConfig::default() };
        let pool = Pool::new(config, |_| contexts.pop().expect("one for each thread"))
            .map_err(WriteError::SetUp)?;
        if !accelerators.is_empty() {
            pool.leave_behind_after(THREADS_END);
        }
        // The depth of the pool, the units that are being filled, and one that waits for room.
        let slots = pool.depth() + FILLING + 1;
        let adapts = options.adapt && settings.codec() == Codec::Zstd;
        let arena = |bytes| Arena::new(slots, bytes).map_err(WriteError::SetUp);
        Ok(Self {
            out: Sealing::new(new, path),
            adapt: adapts.then(|| Adapt::new(settings, threads, pool.depth())),
            settings,
            watchdog: (!accelerators.is_empty()).then(Watchdog::default),
            accelerators,
            pool,
            results: Results::new(slots),
            order: Reorder::new(slots),
            plain: arena(unit_bytes)?,
            stored: arena(room(unit_bytes))?,
            submitted: 0,
            before: 0,
            units: Vec::new(),
        })
    }

    /// Length so far, bytes.
    pub(crate) fn len(&self) -> u64 {
        self.out.at
    }

    /// Counters of the threads' devices.
    pub(crate) fn accelerators(&self) -> &[Arc<Counters>] {
        &self.accelerators
    }

    /// Writes the header, before the first unit.
    pub(crate) fn begin(&mut self, form: Form, shape: Shape) -> Result<(), WriteError> {
        self.out.append(&header(form, shape))
    }

    /// A free buffer for a unit.
    pub(crate) fn buffer(&mut self) -> Result<Slot, WriteError> {
        self.free(|this| this.plain.take())
    }

    /// Adds the unit with the first `len` bytes of `plain`; returns its number.
    pub(crate) fn submit(
        &mut self,
        plain: Slot,
        len: usize,
        page_size: usize,
    ) -> Result<u64, WriteError> {
        let stored = self.free(|this| this.stored.take())?;
        let number = self.submitted;
        let pages = u32::try_from(len / page_size).expect("a unit has few pages");
        let settings = match &mut self.adapt {
            Some(adapt) => adapt.next(number - self.before - self.units.len() as u64),
            None => self.settings,
        };
        let mut job = Encode { number, pages, plain, plain_len: len, stored, settings };
        self.submitted += 1;
        while let Err(back) = self.pool.try_submit(job, &self.results) {
            job = back;
            self.collect()?;
        }
        while let Some(encoded) = self.results.pop() {
            self.arrived(encoded)?;
        }
        Ok(number - self.before)
    }

    /// Calls `take` until it returns a slot; collects units in between.
    fn free(&mut self, take: impl Fn(&Self) -> Option<Slot>) -> Result<Slot, WriteError> {
        loop {
            match take(self) {
                Some(slot) => return Ok(slot),
                None => self.collect()?,
            }
        }
    }

    /// Waits for an encoded unit. With accelerators the wait may end without one: a thread that
    /// never returns from their library never delivers its units.
    fn collect(&mut self) -> Result<(), WriteError> {
        let pause = self.watchdog.is_some().then(|| Instant::now() + PAUSE);
        match self.results.pop_until(pause) {
            Popped::Item(encoded) => self.arrived(encoded),
            Popped::Timeout => {
                let watchdog = self.watchdog.as_mut().expect("only then there is a deadline");
                watchdog.look(Instant::now()).map_or(Ok(()), |hang| Err(hang.into()))
            }
            Popped::Closed => unreachable!("it is open"),
        }
    }

    /// Accepts an encoded unit and writes all units that are next in order.
    fn arrived(&mut self, encoded: Encoded) -> Result<(), WriteError> {
        self.order.insert(encoded.number, encoded).expect("numbered here, and window for all");
        while let Some(encoded) = self.order.pop() {
            if let Err(error) = encoded.verdict {
                return Err(WriteError::Unit { unit: encoded.number - self.before, error });
            }
            let len = u32::try_from(encoded.len).expect("a unit is short");
            let (offset, pages, checksum) = (self.out.at, encoded.pages, encoded.checksum);
            let entry = UnitEntry { file: 0, pages, offset, len, checksum };
            self.out.append(&encoded.stored[..encoded.len])?;
            self.units.push(entry);
        }
        Ok(())
    }

    /// Waits for all units of this file and continues with the file `new`. Returns the units and
    /// the file that holds them.
    pub(crate) fn next(&mut self, new: NewFile) -> Result<(Vec<UnitEntry>, Sealing), WriteError> {
        self.wait()?;
        self.before = self.submitted;
        let next = Sealing::new(new, &self.out.path);
        Ok((std::mem::take(&mut self.units), std::mem::replace(&mut self.out, next)))
    }

    /// Waits for all units and ends the threads; returns the units and the file.
    pub(crate) fn finish(mut self) -> Result<(Vec<UnitEntry>, Sealing), WriteError> {
        self.wait()?;
        drop(self.pool);
        Ok((self.units, self.out))
    }

    fn wait(&mut self) -> Result<(), WriteError> {
        while (self.units.len() as u64) < self.submitted - self.before {
            self.collect()?;
        }
        Ok(())
    }
}

/// A file to which parts and a trailer are appended.
pub(crate) struct Sealing {
    new: NewFile,
    path: PathBuf,
    hash: Hasher,
    at: u64,
    writeback: Writeback,
}

impl Sealing {
    /// Begins a file; `path` is for errors.
    pub(crate) fn new(new: NewFile, path: &Path) -> Self {
        let (hash, writeback) = (Hasher::new(), Writeback::default());
        Self { new, path: path.to_owned(), hash, at: 0, writeback }
    }

    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.hash.write(bytes);
        self.at += bytes.len() as u64;
        self.new.write(bytes).map_err(|source| self.io(source))?;
        self.writeback.grown(self.new.file(), self.at);
        Ok(())
    }

    /// Appends both parts and the trailer, and makes the file durable.
    pub(crate) fn seal(
        mut self,
        form: Form,
        first: &[u8],
        index: &[u8],
    ) -> Result<(NewFile, Trailer), WriteError> {
        let part = |offset, bytes: &[u8]| Part {
            offset,
            len: bytes.len() as u64,
            checksum: checksum(bytes),
        };
        let first_part = part(self.at, first);
        self.append(first)?;
        let index_part = part(self.at, index);
        self.append(index)?;
        let trailer = Trailer {
            first: first_part,
            index: index_part,
            file_len: self.at + TRAILER_LEN as u64,
            hash: self.hash.finish_128(),
        };
        self.append(&trailer.to_bytes(form))?;
        self.new.sync().map_err(|source| self.io(source))?;
        Ok((self.new, trailer))
    }

    fn io(&self, source: io::Error) -> WriteError {
        WriteError::Io { what: "write", path: self.path.clone(), source }
    }
}
