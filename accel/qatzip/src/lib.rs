//! Compression through Intel's QATzip library, with its traps fenced.
//!
//! For sites that standardise on QATzip; the driver of libqat itself (crate `qat`) does more work
//! with less CPU. Payloads are [`codec::qz`] members in both directions: what a session makes, our
//! software, `gunzip`, QEMU's `qatzip` method and any QATzip read, and the other way round.
//!
//! ```text
//!  caller ── Session::compress ──► copy in ─► thread of the session ─► qzCompressExt ─► libqat ─► device
//!                                                │ every footer against our own CRC-32
//!  caller ◄───────────────────── copy out ◄──────┘ Gate: did a call that could have spoilt it end badly?
//! ```
//!
//! # What fails, and what is done about it
//!
//! Every error means: no result, do it in software ([`codec::Encoder`], [`codec::Decoder`]). A
//! session never gives bytes whose CRC-32 it has not checked. [`QatZipError::Busy`] and the errors
//! about sizes are for this call only. Any other one puts QATzip out of use for the rest of the
//! process ([`QatZip::closed`] says why), since QATzip 1.3.1 is not to be trusted after an error:
//!
//! | trap (QATzip 1.3.1, found with the simulated device) | fence |
//! |---|---|
//! | A failed call leaves requests with the device; the next call on that instance takes their answers for its own, returns success, and is wrong | the first error closes the `Gate` for all sessions; a result counts only once all calls it ended beside have ended well |
//! | No timeout anywhere: a silent device hangs the call for ever, and nothing can interrupt it | each session has a thread for its calls; after [`DEADLINE`] the caller gives it up, with its buffers and its session, none of which is used or freed again |
//! | Without a device each call eats a pthread key, until nobody in the process gets one | one attempt to initialise per process; a session exists only if that found a device |
//! | A session whose set-up failed works with the default parameters, which are software | the set-up is checked, and software is taken out of the defaults |
//! | Its exit handlers, and libqat's, take down what a call that never ends still uses: SIGSEGV when the process ends | [`end_process_if_stuck`] ends it without them |
//! | `sw_backup`: software without a word, and it goes on after errors | off; a result that was made in software is refused |
//! | Fewer than 1024 bytes are done in software all the same | refused before the call ([`MIN_PLAIN`]) |
//! | Pinned slots have the size of the first session's buffer; a larger one later overruns them | one size, [`HW_BUFFER`] |
//! | Pinned memory of the caller (`qzMalloc`) goes into its slots as it is: after a call that never ended, its exit handler frees pointers into the middle of it (`munmap_chunk(): invalid pointer`); freed, its pages still count as pinned | ordinary memory, which QATzip copies: the device never sees ours |
//! | `qzMaxCompressedLength` counts the header of one member only | not called; the buffer has room for all |
//! | `qzGetStatus` answers `QZ_OK` and writes nothing | not called; the session's own state is looked at |
//! | Log lines go to standard output | silenced when loaded |
//!
//! What is not checked: whether the deflate stream behind a right CRC-32 is the right one. The
//! device verifies that itself (compress and verify), and the receiver checks each unit: a bit
//! flipped on the way costs the migration, not a byte.
//!
//! Limits: units up to [`codec::MAX_PLAIN`]; 2.2 MiB of memory a session, besides the 5 MiB of
//! pinned memory that QATzip takes an instance; as many sessions as instances, others find it
//! [`QatZipError::Busy`]. A peer whose unit is not sound closes the gate too (it ends its own
//! session as well): servers of several peers had better decode in software. QATzip's log and its
//! wish to find `/dev/vfio` may write to standard error.

pub mod abi;
mod error;
mod exit;
mod gate;
mod library;
mod session;
mod worker;

pub use error::{Closed, LoadError, QatZipError};
pub use exit::end_process_if_stuck;
pub use library::{Paths, QatZip};
pub use session::{Session, DEADLINE};

/// The fewest plain bytes that QATzip gives to a device (`input_sz_thrshold`).
pub const MIN_PLAIN: usize = 1024;

/// `hw_buff_sz`: plain bytes in a member that the device makes, and the most in one it takes.
pub const HW_BUFFER: u32 = 64 << 10;

const _: () = assert!(HW_BUFFER as usize == codec::qz::MEMBER_PLAIN);
