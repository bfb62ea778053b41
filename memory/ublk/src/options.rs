//! A server's options, and the geometries that a device may have by them.

use std::io;
use std::os::fd::OwnedFd;
use std::thread;
use std::time::Duration;

use crate::buffers::Buffers;
use crate::error::ServeError;
use crate::geometry::{Geometry, Info};
use crate::owned::Owner;
use crate::sys::{self, MAX_DEPTH};

/// A server's options.
#[derive(Clone, Debug)]
pub struct Options {
    /// The device's geometry, with the backend's size.
    pub geometry: Geometry,
    /// The time limit of a control command.
    pub timeout: Duration,
    /// The owner of the device.
    pub owner: Owner,
    /// Whether another server takes the device over if this one dies. Otherwise the disk goes with
    /// its server: processes that have it open would wait for ever.
    pub recovers: bool,
}

impl Options {
    /// The options for a backend of `pages` pages. The default number of queues is that of CPUs, at
    /// most 8. A queue has up to 64 requests of up to 512 KiB (a page-out of 128 pages) in flight.
    /// Both numbers are reduced until all buffers together take at most `buffers` bytes, down to 8
    /// requests of 16 KiB.
    pub fn new(pages: u64, queues: Option<u16>, buffers: u64) -> Self {
        Self::on(thread::available_parallelism().map_or(1, usize::from), pages, queues, buffers)
    }

    /// As [`new`](Self::new), on a machine with this number of CPUs.
    pub fn on(cpus: usize, pages: u64, queues: Option<u16>, buffers: u64) -> Self {
        let cpus = u16::try_from(cpus).unwrap_or(u16::MAX).max(1);
        let queues = queues.unwrap_or(8).clamp(1, cpus);
        let mut geometry =
            Geometry { size: pages.saturating_mul(4096), queues, depth: 64, max_io: 512 << 10 };
        while Buffers::len_of(&geometry) > buffers
            && (geometry.depth > 8 || geometry.max_io > 16384)
        {
            // Depth is worth more than length, because most swap requests are short.
            if geometry.max_io > 131_072 || geometry.depth <= 16 && geometry.max_io > 16384 {
                geometry.max_io /= 2;
            } else {
                geometry.depth /= 2;
            }
        }
        Self { geometry, timeout: Duration::from_secs(30), owner: Owner::default(), recovers: true }
    }

    /// Checks that [`Server::recover`](crate::Server::recover) takes over the device that the
    /// driver describes, with buffers of this many bytes. It asks and changes nothing.
    ///
    /// # Errors
    ///
    /// As [`Server::recover`](crate::Server::recover).
    pub fn check(&self, info: &Info, buffers: u64) -> Result<(), ServeError> {
        self.owner.check(info)?;
        let geometry = granted(info, &self.geometry, &LARGEST)?;
        Buffers::check_len(buffers, &geometry)
            .map(drop)
            .map_err(|source| no_buffers(info.id, source))
    }
}

/// The most bytes of a request.
const MAX_IO: u32 = 32 << 20;

/// The most queues and requests, and the longest, that an existing device may have: another version
/// has made it, or the machine had more CPUs or memory then.
pub(crate) const LARGEST: Geometry =
    Geometry { size: u64::MAX, queues: sys::MAX_QUEUES, depth: MAX_DEPTH, max_io: MAX_IO };

/// Refuses geometries that the driver would refuse or interpret differently.
pub(crate) fn checked(geometry: &Geometry, pages: u64) -> Result<Geometry, ServeError> {
    let Geometry { size, queues, depth, max_io } = *geometry;
    let no = |what| Err(ServeError::Geometry { what });
    if size == 0 || size % 4096 != 0 || size / 4096 != pages {
        return no(format!("{size} bytes over a store of {pages} pages"));
    }
    if queues == 0 || queues > sys::MAX_QUEUES {
        return no(format!("{queues} queues, it has 1 to {}", sys::MAX_QUEUES));
    }
    if depth == 0 || depth > sys::MAX_DEPTH {
        return no(format!("{depth} requests in flight, it has 1 to {}", sys::MAX_DEPTH));
    }
    if max_io < 4096 || max_io % 4096 != 0 || max_io > MAX_IO {
        return no(format!(
            "requests of {max_io} bytes, they have 4 KiB to 32 MiB, in whole pages"
        ));
    }
    Ok(*geometry)
}

/// The granted geometry. The driver grants at most one queue a CPU. There are at most as many
/// queues and requests as in `most`, and no request is longer.
pub(crate) fn granted(
    info: &Info,
    wanted: &Geometry,
    most: &Geometry,
) -> Result<Geometry, ServeError> {
    let same = (1..=most.queues).contains(&info.queues)
        && (1..=most.depth).contains(&info.depth)
        && info.max_io >= 4096
        && info.max_io.is_multiple_of(4096)
        && info.max_io <= most.max_io;
    if !same {
        let (has, wanted) = (Box::new(*info), Box::new(*wanted));
        return Err(ServeError::Other { id: info.id, has, wanted });
    }
    Ok(Geometry { size: wanted.size, queues: info.queues, depth: info.depth, max_io: info.max_io })
}

pub(crate) fn buffers_for(
    id: u32,
    kept: Option<OwnedFd>,
    geometry: &Geometry,
) -> Result<Buffers, ServeError> {
    match kept {
        Some(fd) => Buffers::adopt(fd, geometry),
        None => Buffers::new(geometry),
    }
    .map_err(|source| no_buffers(id, source))
}

fn no_buffers(id: u32, source: io::Error) -> ServeError {
    ServeError::Io { id, action: "make its buffers", source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::ControlError;
    use crate::geometry::DiskState;

    #[test]
    fn buffers_stay_within_their_memory_limit() {
        for budget in [1 << 20, 16 << 20, 64 << 20, 1 << 30] {
            let geometry = Options::new(1 << 20, None, budget).geometry;
            checked(&geometry, 1 << 20).unwrap();
            let len = Buffers::len_of(&geometry);
            let smallest = u64::from(geometry.queues) * 8 * 16384;
            assert!(len <= budget.max(smallest), "{geometry:?} takes {len} of {budget}");
        }
        let geometry = Options::new(1 << 20, Some(1), 1 << 30).geometry;
        assert_eq!((geometry.depth, geometry.max_io), (64, 512 << 10));
    }

    #[test]
    fn an_impossible_geometry_is_refused_with_its_numbers() {
        let good = Geometry { size: 8 << 20, queues: 2, depth: 64, max_io: 1 << 20 };
        checked(&good, 2048).unwrap();
        for (bad, word) in [
            (Geometry { size: 8 << 20 | 1, ..good }, "8388609"),
            (Geometry { size: 4 << 20, ..good }, "2048 pages"),
            (Geometry { queues: 0, ..good }, "0 queues"),
            (Geometry { depth: 5000, ..good }, "5000"),
            (Geometry { max_io: 5000, ..good }, "5000"),
        ] {
            let error = checked(&bad, 2048).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn a_device_of_another_geometry_is_not_recovered() {
        let wanted = Geometry { size: 8 << 20, queues: 4, depth: 64, max_io: 1 << 19 };
        let state = DiskState::Quiesced;
        let info = Info { id: 3, queues: 2, depth: 64, max_io: 1 << 19, state, pid: 9, mark: 0 };
        let recovered = |info: &Info| granted(info, &wanted, &LARGEST);
        assert_eq!(recovered(&info).unwrap(), Geometry { queues: 2, ..wanted });
        for bad in [
            Info { queues: sys::MAX_QUEUES + 1, ..info },
            Info { queues: 0, ..info },
            Info { depth: MAX_DEPTH + 1, ..info },
            Info { depth: 0, ..info },
            Info { max_io: 64 << 20, ..info },
            Info { max_io: 5000, ..info },
            Info { max_io: 0, ..info },
        ] {
            let error = recovered(&bad).unwrap_err();
            assert!(matches!(error, ServeError::Other { id: 3, .. }), "{error}");
        }
    }

    /// CPUs are taken offline, a cpuset or a quota shrinks, a balloon takes memory; and back.
    #[test]
    fn a_disk_is_recovered_whatever_cpus_and_memory_the_machine_has_now() {
        let at = |cpus, queues, budget| Options::on(cpus, 2048, queues, budget);
        let machines = [
            at(1, None, 256 << 10),
            at(2, Some(2), 512 << 10),
            at(4, None, 64 << 20),
            at(8, None, 256 << 20),
            at(64, Some(32), 256 << 20),
        ];
        for (then, now) in
            machines.iter().flat_map(|then| machines.iter().map(move |now| (then, now)))
        {
            let Geometry { queues, depth, max_io, .. } = then.geometry;
            let mark = now.owner.mark();
            let state = DiskState::Quiesced;
            let info = Info { id: 3, queues, depth, max_io, state, pid: 9, mark };
            let recovered = granted(&info, &now.geometry, &LARGEST).unwrap();
            assert_eq!(recovered, then.geometry, "{now:?}");
            // A server that is to replace a live one finds the same before that one ends.
            let len = Buffers::len_of(&then.geometry);
            now.check(&info, len).unwrap();
            let short = now.check(&info, len - 1).unwrap_err();
            assert!(matches!(short, ServeError::Io { id: 3, .. }), "{short}");
            let other = now.check(&Info { mark: mark + 1, ..info }, len).unwrap_err();
            let other = matches!(other, ServeError::Control(ControlError::Another { id: 3, .. }));
            assert!(other, "a device of another owner");
            let impossible = now.check(&Info { queues: 0, ..info }, len).unwrap_err();
            assert!(matches!(impossible, ServeError::Other { id: 3, .. }), "{impossible}");
        }
    }

    #[test]
    fn a_device_with_more_or_longer_requests_is_recovered_with_the_buffers_that_it_has() {
        // The geometry of earlier versions on a machine of 256 MiB, and that of this one.
        let oldest = Geometry { size: 8 << 20, queues: 2, depth: 16, max_io: 32 << 10 };
        for older in [oldest, Geometry { max_io: 16 << 10, ..oldest }] {
            recovers(older, Geometry { depth: 8, max_io: 16 << 10, ..older });
        }
    }

    fn recovers(older: Geometry, wanted: Geometry) {
        let state = DiskState::Quiesced;
        let (depth, max_io) = (older.depth, older.max_io);
        let info = Info { id: 3, queues: 2, depth, max_io, state, pid: 9, mark: 0 };
        let geometry = granted(&info, &wanted, &LARGEST).unwrap();
        assert_eq!(geometry, older);
        buffers_for(3, Some(Buffers::file(&older).unwrap()), &geometry).unwrap();
        // Buffers of this version's length would let the kernel write beyond them.
        let short = buffers_for(3, Some(Buffers::file(&wanted).unwrap()), &geometry).unwrap_err();
        assert!(matches!(short, ServeError::Io { id: 3, .. }), "{short}");
        // A new device never has more or longer requests than were asked for.
        let error = granted(&info, &wanted, &wanted).unwrap_err();
        assert!(matches!(error, ServeError::Other { id: 3, .. }), "{error}");
        // The earlier version takes back what this one has made.
        let info = Info { depth: wanted.depth, max_io: wanted.max_io, ..info };
        assert_eq!(granted(&info, &older, &older).unwrap(), wanted);
    }
}
