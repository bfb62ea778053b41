//! The thread of a session: the only place where QATzip is called to work.

#![expect(unsafe_code, reason = "calls a C library; each block says why that is sound")]

use std::ffi::{c_int, c_uint};
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::PoisonError;

use codec::{qz, MAX_PLAIN};

use crate::abi::{self, QzSession};
use crate::{Closed, QatZip, QatZipError};

/// What one session works on. Our own copies: a call that hangs keeps them, and nobody else does.
///
/// Ordinary memory, not QATzip's: what comes from `qzMalloc(PINNED)` it gives to the device as it
/// is, in the place of a slot of its own. A call that never ends leaves it there, and QATzip's exit
/// handler then frees a pointer into the middle of ours. What is not pinned it copies.
#[derive(Debug)]
pub(crate) struct Buffers {
    /// What goes in, at most a unit.
    pub(crate) input: Vec<u8>,
    /// What comes out. More than a unit, since data may grow, and not as `qzMaxCompressedLength`
    /// says, which counts the header of one member only (an operator's precedence).
    pub(crate) output: Vec<u8>,
}

impl Buffers {
    fn new() -> Option<Self> {
        let zeroed = |len| {
            let mut bytes = Vec::new();
            bytes.try_reserve_exact(len).ok()?;
            bytes.resize(len, 0);
            Some(bytes)
        };
        Some(Self { input: zeroed(INPUT)?, output: zeroed(OUTPUT)? })
    }
}

const INPUT: usize = MAX_PLAIN;
/// Per piece QATzip's own bound (9/8 of the plain bytes and 1 KiB) and a header and footer.
const OUTPUT: usize = MAX_PLAIN / 8 * 9 + MAX_PLAIN / qz::MEMBER_PLAIN * (1024 + 64);

/// One call, on the session's own buffers.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) work: Work,
    pub(crate) buffers: Buffers,
    pub(crate) ticket: u64,
}

/// What to do with the front of the input buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    Compress { plain_len: usize },
    Decompress { payload_len: usize, plain_len: usize },
}

impl Work {
    pub(crate) fn call(self) -> &'static str {
        match self {
            Self::Compress { .. } => "qzCompressExt",
            Self::Decompress { .. } => "qzDecompressExt",
        }
    }
}

/// How the call ended: bytes at the front of the output buffer.
#[derive(Debug)]
pub(crate) struct Done {
    /// `None`: the device may still own them.
    pub(crate) buffers: Option<Buffers>,
    pub(crate) result: Result<usize, QatZipError>,
}

/// Starts a session, does the jobs, ends the session. After an error it leaves everything as it is:
/// the device may still write to it.
pub(crate) fn run(
    library: &QatZip,
    level: u8,
    ready: &SyncSender<Result<Buffers, QatZipError>>,
    jobs: &Receiver<Job>,
    done: &SyncSender<Done>,
) {
    let mut session = match Open::new(library, level) {
        Ok((session, buffers)) => {
            // Whoever waits for it has gone: then the gate is closed, and the session stays.
            if ready.send(Ok(buffers)).is_err() {
                return;
            }
            session
        }
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    for Job { work, mut buffers, ticket } in jobs {
        let outcome = session.call(work, &mut buffers);
        let result = match outcome {
            Ok(len) => library.gate.finish(ticket).map(|()| len),
            Err(Failure::Busy) => {
                library.gate.leave(ticket);
                Err(QatZipError::Busy)
            }
            Err(Failure::Fatal(reason)) => {
                library.gate.fail(ticket, reason.clone());
                Err(reason.into())
            }
        };
        let lost = matches!(result, Err(QatZipError::Closed(_)));
        let buffers = if lost {
            // A device with shared virtual memory may still be at work on them.
            std::mem::forget(buffers);
            None
        } else {
            Some(buffers)
        };
        if done.send(Done { buffers, result }).is_err() || lost {
            return;
        }
    }
    if library.gate.closed().is_none() {
        session.close();
    }
}

/// A session that has been set up on a device. Dropped without [`Open::close`], it stays for ever.
struct Open<'a> {
    library: &'a QatZip,
    session: &'static mut QzSession,
}

enum Failure {
    /// Nothing was submitted.
    Busy,
    /// Nobody knows what the device still does.
    Fatal(Closed),
}

impl<'a> Open<'a> {
    fn new(library: &'a QatZip, level: u8) -> Result<(Self, Buffers), QatZipError> {
        // In turn: the first to find no device closes the gate for the others.
        let _turn = library.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(closed) = library.closed() {
            return Err(closed.into());
        }
        let (session, outcome) = Self::set_up(library, level);
        if let Err(reason) = outcome {
            library.gate.close(reason.clone());
            return Err(reason.into());
        }
        let open = Self { library, session };
        match Buffers::new() {
            Some(buffers) => Ok((open, buffers)),
            None => {
                open.close();
                Err(QatZipError::Memory { bytes: INPUT + OUTPUT })
            }
        }
    }

    fn set_up(library: &QatZip, level: u8) -> (&'static mut QzSession, Result<(), Closed>) {
        // Leaked, since after an error the library may still look at it.
        let session = Box::leak(Box::new(QzSession {
            hw_session_stat: 0,
            thd_sess_stat: 0,
            internal: std::ptr::null_mut(),
            total_in: 0,
            total_out: 0,
        }));
        // SAFETY: a session of the library's own layout; 0: no software.
        let code = unsafe { (library.calls.init)(&raw mut *session, 0) };
        if code != abi::QZ_OK && code != abi::QZ_DUPLICATE {
            return (session, Err(failed("qzInit", code)));
        }
        let mut params = library.calls.params(level);
        // SAFETY: as above; the library copies the parameters.
        let code = unsafe { (library.calls.setup)(&raw mut *session, &raw mut params) };
        let outcome = if code != abi::QZ_OK {
            Err(failed("qzSetupSessionDeflate", code))
        } else if session.hw_session_stat != 0 || session.internal.is_null() {
            let state = format!("a session in state {}", session.hw_session_stat);
            Err(Closed::new("qzSetupSessionDeflate", state))
        } else {
            Ok(())
        };
        (session, outcome)
    }

    /// Does `work` in one call and checks what came out.
    fn call(&mut self, work: Work, buffers: &mut Buffers) -> Result<usize, Failure> {
        let calls = &self.library.calls;
        let (input_len, room) = match work {
            Work::Compress { plain_len } => (plain_len, buffers.output.len()),
            Work::Decompress { payload_len, plain_len } => (payload_len, plain_len),
        };
        let fatal = |reason: String| Failure::Fatal(Closed::new(work.call(), reason));
        let (Ok(mut consumed), Ok(mut produced)) =
            (c_uint::try_from(input_len), c_uint::try_from(room))
        else {
            return Err(fatal(format!("lengths {input_len} and {room}")));
        };
        let mut extended = 0;
        let src = buffers.input.as_ptr();
        let dest = buffers.output.as_mut_ptr();
        let session = &raw mut *self.session;
        let code = match work {
            // SAFETY: a session that was set up and has had no error; `src` and `dest` are memory
            // of at least the lengths given, for as long as library or device may use them: on any
            // error it is given up, not freed. Last argument but one: the data are whole.
            Work::Compress { .. } => unsafe {
                (calls.compress)(
                    session,
                    src,
                    &raw mut consumed,
                    dest,
                    &raw mut produced,
                    1,
                    &raw mut extended,
                )
            },
            // SAFETY: as above.
            Work::Decompress { .. } => unsafe {
                (calls.decompress)(
                    session,
                    src,
                    &raw mut consumed,
                    dest,
                    &raw mut produced,
                    &raw mut extended,
                )
            },
        };
        match code {
            abi::QZ_OK => {}
            abi::QZ_NOSW_NO_INST_ATTACH => return Err(Failure::Busy),
            code => return Err(Failure::Fatal(failed(work.call(), code))),
        }
        if extended & abi::QZ_SW_EXECUTION_MASK != 0 {
            return Err(fatal("done in software, which is switched off".into()));
        }
        let (consumed, produced) = (widen(consumed), widen(produced));
        if consumed != input_len {
            return Err(fatal(format!("{consumed} of {input_len} bytes taken")));
        }
        let input = buffers.input.get(..input_len).unwrap_or_default();
        let output = buffers.output.get(..produced).ok_or_else(|| {
            fatal(format!("{produced} bytes put into a buffer of {}", buffers.output.len()))
        })?;
        let (plain, payload) = match work {
            Work::Compress { .. } => (input, output),
            Work::Decompress { plain_len, .. } if plain_len != produced => {
                return Err(fatal(format!("{produced} bytes made of {plain_len}")));
            }
            Work::Decompress { .. } => (output, input),
        };
        verify(plain, payload).map_err(fatal)?;
        Ok(produced)
    }

    fn close(self) {
        // SAFETY: a session that was set up and is not used again.
        unsafe { (self.library.calls.teardown)(&raw mut *self.session) };
        // SAFETY: from `Box::leak` in `set_up`, whose only reference this is; torn down, the
        // library has no more use for it.
        drop(unsafe { Box::from_raw(self.session) });
    }
}

/// Whether `payload` is members of the device's making whose footers are those of `plain`.
fn verify(plain: &[u8], payload: &[u8]) -> Result<(), String> {
    let members = qz::members(payload, plain.len()).map_err(|error| error.to_string())?;
    let mut rest = plain;
    for member in members {
        let (piece, after) = rest.split_at_checked(member.plain_len).ok_or("too long")?;
        rest = after;
        if piece.len() > qz::MEMBER_PLAIN {
            return Err(format!("a member of {} bytes: made in software", piece.len()));
        }
        let crc32 = qz::crc32(piece);
        if member.crc32 != crc32 {
            let (at, got) = (member.at, member.crc32);
            return Err(format!("member at byte {at} has CRC-32 {got:08x}, expected {crc32:08x}"));
        }
    }
    Ok(())
}

fn failed(call: &'static str, code: c_int) -> Closed {
    let meaning = match code {
        abi::QZ_BUF_ERROR => "a buffer is too small",
        abi::QZ_DATA_ERROR => "the data are not sound",
        abi::QZ_NOSW_NO_HW => "no QAT device",
        abi::QZ_NOSW_NO_INST_ATTACH => "no QAT instance",
        abi::QZ_NOSW_LOW_MEM => "not enough pinned memory",
        _ => "failed",
    };
    Closed::new(call, format!("{meaning} (code {code})"))
}

/// 32 bits into a `usize`, which has them on every target that has a QATzip.
fn widen(len: c_uint) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(piece: &[u8], crc32: u32) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        let plain_len = u32::try_from(piece.len()).unwrap();
        let len = qz::write_member(&mut bytes, &[3, 0], crc32, plain_len).unwrap();
        bytes.truncate(len);
        bytes
    }

    #[test]
    fn footers_that_are_not_those_of_the_plain_bytes_are_found() {
        let plain: Vec<u8> = (0_u32..70_000).map(|at| at.to_le_bytes()[1]).collect();
        let (first, second) = plain.split_at(65_536);
        let (one, two) = (qz::crc32(first), qz::crc32(second));
        let sound = [member(first, one), member(second, two)].concat();
        assert_eq!(verify(&plain, &sound), Ok(()));
        let swapped = [member(first, two), member(second, one)].concat();
        assert!(verify(&plain, &swapped).unwrap_err().contains("at byte 0 has CRC-32"));
        let wrong = [member(first, one), member(second, two ^ 1)].concat();
        assert!(verify(&plain, &wrong).unwrap_err().contains("at byte 34 has CRC-32"));
        assert!(verify(&plain[1..], &sound).is_err());
        assert!(verify(&plain, &sound[..34]).is_err());
        let whole = member(&plain, qz::crc32(&plain));
        assert!(verify(&plain, &whole).unwrap_err().contains("made in software"));
    }
}
