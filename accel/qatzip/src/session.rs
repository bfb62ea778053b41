//! The caller's side of a session: copies, deadlines, and what may be asked for.

use std::sync::mpsc::{sync_channel, Receiver, RecvTimeoutError, SyncSender};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use codec::{qz, MAX_PLAIN};

use crate::error::silent;
use crate::worker::{self, Buffers, Done, Job, Work};
use crate::{Closed, QatZip, QatZipError, MIN_PLAIN};

/// How long a call may take, unless [`Session::set_deadline`] says otherwise. A unit takes a device
/// about a millisecond; what is slower than this, VMs feel.
pub const DEADLINE: Duration = Duration::from_secs(1);

/// How long finding and starting the device may take: once per process, the driver's own business.
const START_DEADLINE: Duration = Duration::from_secs(10);

/// A QATzip session at one level, with a thread of its own; used by one thread at a time.
#[derive(Debug)]
pub struct Session {
    library: Arc<QatZip>,
    /// `None` once the session is being dropped.
    jobs: Option<SyncSender<Job>>,
    done: Receiver<Done>,
    /// `None` once they were given up; then the gate is closed as well.
    buffers: Option<Buffers>,
    deadline: Duration,
}

impl Session {
    /// Starts a session at `level`, 1 to 9. The first one in the process starts the device, which
    /// can take seconds.
    ///
    /// # Errors
    ///
    /// A level that does not exist, no memory, no thread, and [`QatZipError::Closed`]: no device,
    /// or an error before.
    pub fn new(library: &Arc<QatZip>, level: i32) -> Result<Self, QatZipError> {
        let checked = u8::try_from(level).ok().filter(|level| (1..=9).contains(level));
        let level = checked.ok_or(QatZipError::Level(level))?;
        let (jobs, todo) = sync_channel(1);
        let (report, done) = sync_channel(1);
        let (ready, started) = sync_channel(1);
        thread::Builder::new()
            .name("qatzip".into())
            .spawn({
                let library = Arc::clone(library);
                move || worker::run(&library, level, &ready, &todo, &report)
            })
            .map_err(|error| QatZipError::Thread(error.to_string()))?;
        let buffers = match started.recv_timeout(START_DEADLINE) {
            Ok(result) => result?,
            Err(error) => return Err(give_up(library, "qzInit", START_DEADLINE, error)),
        };
        let library = Arc::clone(library);
        Ok(Self { library, jobs: Some(jobs), done, buffers: Some(buffers), deadline: DEADLINE })
    }

    /// How long a call may take from now on before it is given up, and QATzip with it.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    /// Compresses `plain` into members in `out` and returns their length.
    ///
    /// The result may be longer than `plain`, if `out` has room for that: then the plain bytes had
    /// better be sent as they are.
    ///
    /// # Errors
    ///
    /// Any: do it in software. See [`QatZipError`].
    pub fn compress(&mut self, plain: &[u8], out: &mut [u8]) -> Result<usize, QatZipError> {
        if plain.len() < MIN_PLAIN {
            return Err(QatZipError::TooShort { len: plain.len() });
        }
        if plain.len() > MAX_PLAIN {
            return Err(QatZipError::TooLong { len: plain.len() });
        }
        self.call(Work::Compress { plain_len: plain.len() }, plain, |result| {
            let (len, room) = (result.len(), out.len());
            out.get_mut(..len).ok_or(QatZipError::NoRoom { len, room })?.copy_from_slice(result);
            Ok(len)
        })
    }

    /// Decompresses the members of `payload` into exactly `out`.
    ///
    /// # Errors
    ///
    /// Any: do it in software, which also says what is wrong with a payload that is not sound.
    pub fn decompress(&mut self, payload: &[u8], out: &mut [u8]) -> Result<(), QatZipError> {
        suitable(payload, out.len())?;
        let work = Work::Decompress { payload_len: payload.len(), plain_len: out.len() };
        self.call(work, payload, |result| {
            out.copy_from_slice(result);
            Ok(())
        })
    }

    /// Has `work` done on `input` and hands what comes out to `take`.
    fn call<T>(
        &mut self,
        work: Work,
        input: &[u8],
        take: impl FnOnce(&[u8]) -> Result<T, QatZipError>,
    ) -> Result<T, QatZipError> {
        let gone = || Closed::new(work.call(), "the session was given up before");
        let ticket = self.library.gate.enter()?;
        let ready = self.buffers.take().and_then(|mut buffers| {
            buffers.input.get_mut(..input.len())?.copy_from_slice(input);
            Some(buffers)
        });
        let Some(buffers) = ready else {
            self.library.gate.fail(ticket, gone());
            return Err(gone().into());
        };
        let sent = self.jobs.as_ref().map(|jobs| jobs.send(Job { work, buffers, ticket }));
        if !matches!(sent, Some(Ok(()))) {
            self.library.gate.fail(ticket, gone());
            return Err(gone().into());
        }
        match self.done.recv_timeout(self.deadline) {
            Ok(Done { buffers, result }) => {
                let taken = match (&buffers, result) {
                    (_, Err(error)) => Err(error),
                    (Some(buffers), Ok(len)) => take(buffers.output.get(..len).unwrap_or_default()),
                    (None, Ok(_)) => Err(gone().into()),
                };
                self.buffers = buffers;
                taken
            }
            Err(error) => Err(give_up(&self.library, work.call(), self.deadline, error)),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.jobs = None;
        if self.library.gate.closed().is_some() {
            // Whatever the thread is in, it may stay in.
            return;
        }
        // The thread tears the session down and ends, which disconnects us.
        let _ = self.done.recv_timeout(self.deadline);
    }
}

/// Nobody touches the library again, the thread in it least of all.
fn give_up(
    library: &QatZip,
    call: &'static str,
    deadline: Duration,
    error: RecvTimeoutError,
) -> QatZipError {
    let reason = match error {
        RecvTimeoutError::Timeout => silent(call, deadline),
        RecvTimeoutError::Disconnected => Closed::new(call, "the session's thread is gone"),
    };
    crate::exit::stuck();
    library.gate.close(reason.clone());
    library.closed().unwrap_or(reason).into()
}

/// Whether a device takes these members: QATzip's limits, checked before its parser sees them.
fn suitable(payload: &[u8], plain_len: usize) -> Result<(), QatZipError> {
    // The payload is as long as the unit at most, or it would not be one.
    if let Some(len) = [plain_len, payload.len()].into_iter().find(|&len| len > MAX_PLAIN) {
        return Err(QatZipError::TooLong { len });
    }
    let members = qz::members(payload, plain_len)
        .map_err(|error| QatZipError::Unsuitable(error.to_string()))?;
    for member in members {
        let len = member.plain_len;
        if len < MIN_PLAIN {
            return Err(QatZipError::TooShort { len });
        }
        if len > qz::MEMBER_PLAIN || member.deflate.len() > MAX_DEFLATE {
            let why = format!("a member of {len} bytes from {}", member.deflate.len());
            return Err(QatZipError::Unsuitable(why));
        }
    }
    if plain_len == 0 {
        return Err(QatZipError::TooShort { len: 0 });
    }
    Ok(())
}

/// The longest deflate stream that fits QATzip's slots.
const MAX_DEFLATE: usize = qz::MEMBER_PLAIN / 8 * 9 + 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn member(plain_len: u32, deflate_len: usize) -> Vec<u8> {
        let mut bytes = vec![0; deflate_len + qz::MEMBER_OVERHEAD];
        qz::write_member(&mut bytes, &vec![1; deflate_len], 0, plain_len).unwrap();
        bytes
    }

    #[test]
    fn only_members_that_a_device_takes_get_there() {
        let both = [member(65_536, 1000), member(1024, 10)].concat();
        assert_eq!(suitable(&both, 66_560), Ok(()));
        assert_eq!(suitable(&member(65_536, MAX_DEFLATE), 65_536), Ok(()));
        for (payload, plain_len) in [
            (member(65_536, MAX_DEFLATE + 1), 65_536),
            (member(65_537, 1000), 65_537),
            (both.clone(), 66_561),
            (both[..both.len() - 1].to_vec(), 66_560),
        ] {
            let error = suitable(&payload, plain_len).unwrap_err();
            assert!(matches!(error, QatZipError::Unsuitable(_)), "{error}");
        }
        let short = [member(65_536, 1000), member(1023, 10)].concat();
        assert_eq!(suitable(&short, 66_559), Err(QatZipError::TooShort { len: 1023 }));
        assert_eq!(suitable(&[], 0), Err(QatZipError::TooShort { len: 0 }));
        let error = suitable(&vec![0; MAX_PLAIN + 1], 4096).unwrap_err();
        assert_eq!(error, QatZipError::TooLong { len: MAX_PLAIN + 1 });
    }
}
