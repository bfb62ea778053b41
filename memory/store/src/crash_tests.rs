//! `kill -9` between any two steps of every operation, takeover included.
//!
//! A child takes the store over, executes a list of operations and counts those that are done in
//! shared memory. It is killed at step 1, then at step 2, and so on until it reaches the end. Each
//! time the parent takes over: every page must have the contents of the operations done, or those
//! of the operation in which the child died.
#![expect(unsafe_code, reason = "forks a child that is killed")]

mod late;
mod steps;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{memfd_create, MemfdFlags};
use rustix::process::{waitpid, Pid, WaitOptions};

use crate::backing::format_backing;
use crate::batch::{Added, Batch};
use crate::dictionary::MAX_DICTIONARY;
use crate::disk::{Block, Disk};
use crate::entry::{State, MAX_OBJECT};
use crate::file_disk::FileDisk;
use crate::group_buffer::{GroupBuffer, Seen};
use crate::inject;
use crate::layout::DICTIONARIES;
use crate::modify::{Change, ModifyError};
use crate::object::{dictionary_of, DICTIONARY_TAG};
use crate::options::Options;
use crate::page::{Page, PutError};
use crate::store::Store;
use crate::superblock;
use crate::sync::Ordering;
use crate::worker::Worker;
use crate::writeback::BackBuffer;

const PAGES: u64 = 300;

#[derive(Clone, Copy, Debug)]
enum Op {
    Put(u64, usize),
    Same(u64, u64),
    Discard(u64, u64),
    Get(u64),
    Replace(u64, usize),
    /// Writes a part of the page, which then has these contents.
    Modify(u64, usize),
    ModifySame(u64, u64),
    /// Makes a group of those of this many pages from here on that are objects.
    Group(u64, u64, usize),
    Leave(u64, usize),
    /// Writes back those of this many pages from here on that are in memory.
    WriteBack(u64, u64),
    BringBack(u64, usize),
    /// A number of bytes.
    Dictionary(usize),
    Compact,
    Trim,
    Rest,
    /// As the keeper for a worker that waits for a slab of this many pages.
    Trade(u32),
}

/// The contents of pages.
type Held = HashMap<u64, Vec<u8>>;

fn bytes(index: u64, number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at as u64 * 31 + index * 7 + number as u64 * 13).to_le_bytes()[0]).collect()
}

/// Fills the store so that the operations have objects to move, and memory to free.
fn prelude() -> Vec<Op> {
    let mut ops: Vec<Op> =
        (0..200).map(|i| Op::Put(i, if i % 2 == 0 { 600 } else { 1500 })).collect();
    ops.extend((0..200).filter(|i| i % 5 < 3).map(|i| Op::Discard(i, 1)));
    ops
}

// Over 80 lines: the script is a list.
fn script() -> Vec<Op> {
    vec![
        Op::Put(0, 1500),
        Op::Put(1, 1500),
        Op::Put(4, 10),
        Op::Same(3, 0),
        Op::Same(4, 0x6162_6364_6566_6768),
        Op::Put(205, 4096),
        Op::Put(205, 3000),
        Op::Get(9),
        Op::Replace(8, 700),
        Op::Discard(100, 9),
        Op::Compact,
        Op::Put(206, 1500),
        Op::Rest,
        Op::Trim,
        Op::Discard(0, 300),
        Op::Trim,
        Op::Put(7, 4096),
        // Groups: made, one with absent pages, written to, left, moved, freed.
        Op::Put(8, 900),
        Op::Put(9, 901),
        Op::Put(11, 902),
        Op::Put(12, 4096),
        Op::Put(14, 903),
        Op::Put(15, 904),
        Op::Group(7, 5, 9000),
        Op::Group(12, 9, 28_000),
        Op::Put(9, 77),
        Op::Compact,
        Op::Leave(8, 1400),
        Op::Get(12),
        Op::Discard(7, 2),
        Op::Discard(11, 1),
        Op::Put(16, 3000),
        Op::Group(15, 2, 50),
        Op::Group(16, 1, 50),
        Op::Compact,
        Op::Discard(12, 3),
        Op::Trim,
        // Written back and brought back: uncompressed pages, small ones, pages of a group;
        // overwritten, discarded.
        Op::Put(20, 4096),
        Op::Put(21, 4096),
        Op::Put(22, 300),
        Op::Put(23, 3000),
        Op::Put(24, 1200),
        Op::Put(25, 700),
        Op::Put(26, 800),
        Op::Group(25, 2, 900),
        Op::WriteBack(20, 9),
        Op::Get(22),
        Op::Put(20, 100),
        Op::BringBack(23, 3001),
        Op::Discard(21, 2),
        Op::Put(27, 2000),
        Op::WriteBack(20, 9),
        Op::Compact,
        Op::Put(25, 4096),
        Op::Discard(26, 1),
        Op::WriteBack(15, 30),
        Op::Trim,
        // Partial writes: of an object, longer and shorter; of an absent page; of a same-filled
        // page, and to one.
        Op::Put(220, 1200),
        Op::Modify(220, 1300),
        Op::Modify(220, 40),
        Op::Modify(210, 4096),
        Op::Same(211, 9),
        Op::Modify(211, 1600),
        Op::ModifySame(220, 0x1122_3344_5566_7788),
        Op::ModifySame(210, 0),
        Op::ModifySame(212, 77),
        Op::Modify(220, 500),
        Op::Dictionary(5000),
        Op::Put(30, 1700),
        Op::Dictionary(MAX_DICTIONARY),
        Op::Put(31, 1800),
        Op::Put(30, 900),
        Op::Compact,
        Op::Trim,
    ]
}

/// A store limited to 36 pages: writes that are refused, writes that use ready slabs of other
/// lengths, and writes that free memory for themselves.
fn full_script() -> Vec<Op> {
    let mut ops: Vec<Op> = (0..60).map(|i| Op::Put(i, 2000)).collect();
    // Whole slabs of one length are ready, and another length is asked for.
    ops.push(Op::Discard(0, 40));
    ops.extend((60..80).map(|i| Op::Put(i, 4096)));
    ops.extend([Op::Modify(50, 4096), Op::Modify(51, 100), Op::Modify(61, 4000), Op::Put(90, 50)]);
    ops.push(Op::Discard(40, 40));
    ops.extend((100..130).map(|i| Op::Modify(i, 900)));
    ops.extend([Op::Put(130, 3000), Op::Discard(100, 15), Op::Trade(6), Op::Trade(1)]);
    ops.extend((140..170).map(|i| Op::Put(i, 600)));
    ops.extend([Op::Compact, Op::Put(175, 3000), Op::Trim, Op::Discard(0, 300), Op::Trade(4)]);
    ops.extend((0..9).map(|i| Op::Put(i, 4096)));
    ops
}

/// Executes an operation; returns whether it was done: always, unless there is no room.
// Over 80 lines: one arm for each operation.
fn apply(store: &Store, worker: &mut Worker, number: usize, op: Op) -> bool {
    let full = store.options.mem_limit > 0;
    match op {
        Op::Put(index, len) => {
            // With the newest dictionary, if there is one.
            let newest = store.dictionaries().checked_sub(1).and_then(|at| u8::try_from(at).ok());
            let tag = newest.map_or(3, |at| DICTIONARY_TAG + at);
            return match worker.put(index, tag, &bytes(index, number, len)) {
                Err(PutError::Full { .. }) if full => false,
                result => {
                    assert_eq!(result, Ok(()));
                    true
                }
            };
        }
        Op::Same(index, word) => worker.put_same(index, word).expect("there is no limit"),
        Op::Discard(from, count) => worker.discard(from..from + count),
        Op::Modify(index, len) => {
            let new = bytes(index, number, len);
            let edit = |_, out: &mut [u8; MAX_OBJECT]| {
                out[..len].copy_from_slice(&new);
                Some(Change::Object { tag: 3, len })
            };
            return match worker.modify(index, &mut [0; MAX_OBJECT], edit) {
                Err(ModifyError::Put(PutError::Full { .. })) if full => false,
                result => {
                    assert_eq!(result, Ok(()));
                    true
                }
            };
        }
        Op::ModifySame(index, word) => {
            let same = |_, _: &mut [u8; MAX_OBJECT]| Some(Change::Same(word));
            assert_eq!(worker.modify(index, &mut [0; MAX_OBJECT], same), Ok(()));
        }
        Op::Replace(index, len) => {
            let new = bytes(index, number, len);
            let recode = |_, _: &[u8], out: &mut [u8; MAX_OBJECT]| {
                out[..len].copy_from_slice(&new);
                Some((4, len))
            };
            assert_eq!(worker.replace(index, &mut [0; MAX_OBJECT], recode), Ok(true));
        }
        Op::Group(from, count, len) => {
            let mut held = Held::new();
            for index in from..from + count {
                let mut out = [0; MAX_OBJECT];
                if let Page::Object { len, .. } = worker.look(index, &mut out).expect("sound") {
                    held.insert(index, out[..len].to_vec());
                }
            }
            let members = members(&held, from, count);
            let seen: Vec<_> =
                members.iter().map(|&index| Seen { index, tag: 3, bytes: &held[&index] }).collect();
            let mut buffer = GroupBuffer::new();
            buffer.room()[..len].copy_from_slice(&bytes(from, number, len));
            let joined = worker.put_group(&seen, 6, len, &mut buffer);
            let all = u32::MAX.checked_shr(32 - u32::try_from(seen.len()).unwrap()).unwrap_or(0);
            assert_eq!(joined.unwrap_or(0), all, "a group of {}", seen.len());
        }
        Op::Leave(index, len) => {
            let mut buffer = GroupBuffer::new();
            worker.look_group(index, &mut buffer).expect("sound").expect("it is in one");
            let new = bytes(index, number, len);
            assert_eq!(worker.ungroup(index, &buffer, (3, &new), false), Ok(true));
        }
        Op::WriteBack(from, count) => {
            let mut batch = Batch::new(16);
            for index in from..from + count {
                let mut out = [0; MAX_OBJECT];
                let added = match worker.look(index, &mut out).expect("sound") {
                    Page::Object { tag, len } => {
                        batch.add(&Seen { index, tag, bytes: &out[..len] })
                    }
                    Page::Grouped => {
                        let mut buffer = GroupBuffer::new();
                        worker
                            .look_group(index, &mut buffer)
                            .expect("sound")
                            .expect("it is in one");
                        batch.add_grouped(index, &buffer, 3, &bytes(index, number, 500))
                    }
                    _ => continue,
                };
                assert_eq!(added, Added::Yes);
            }
            let pages = batch.len() as u64;
            assert_eq!(worker.write_back(&mut batch).map(|done| done.pages), Ok(pages));
        }
        Op::BringBack(index, len) => {
            let mut buffer = BackBuffer::new();
            let mut out = [0; MAX_OBJECT];
            worker.read_back(index, &mut buffer, &mut out).expect("sound").expect("it is there");
            let new = bytes(index, number, len);
            assert_eq!(worker.bring_back(index, &buffer, 3, &new), Ok(true));
        }
        Op::Get(index) => drop(read(worker, index)),
        Op::Dictionary(len) => {
            store.install_dictionary(&bytes(0, number, len), 7).expect("there is room");
        }
        Op::Compact => drop(store.compact()),
        Op::Trim => drop(store.trim()),
        Op::Rest => worker.rest(),
        Op::Trade(pages) => {
            store.heap.regions.trade(&store.heap.map, pages);
            // There may be no room.
            let _ = store.heap.grow(pages, None);
        }
    }
    true
}

fn expect(held: &mut Held, number: usize, op: Op) {
    match op {
        Op::Group(from, count, len) => {
            for (position, index) in members(held, from, count).into_iter().enumerate() {
                held.insert(index, grouped(&bytes(from, number, len), position));
            }
        }
        Op::WriteBack(from, count) => {
            for index in from..from + count {
                if held.get(&index).is_some_and(|bytes| bytes.len() > MAX_OBJECT) {
                    held.insert(index, bytes(index, number, 500));
                }
            }
        }
        Op::Put(index, len)
        | Op::Replace(index, len)
        | Op::Modify(index, len)
        | Op::Leave(index, len)
        | Op::BringBack(index, len) => drop(held.insert(index, bytes(index, number, len))),
        Op::Same(index, word) | Op::ModifySame(index, word) => {
            drop(held.insert(index, word.to_le_bytes().repeat(512)))
        }
        Op::Discard(from, count) => held.retain(|page, _| !(from..from + count).contains(page)),
        Op::Get(_) | Op::Dictionary(_) | Op::Compact | Op::Trim | Op::Rest | Op::Trade(_) => {}
    }
}

/// The pages that the script puts in groups: objects with tag 3.
fn members(held: &Held, from: u64, count: u64) -> Vec<u64> {
    let object = |index: &u64| held.get(index).is_some_and(|bytes| bytes.len() <= MAX_OBJECT);
    (from..from + count).filter(object).collect()
}

/// The stand-in for a page in a group: longer than any object.
fn grouped(payload: &[u8], position: usize) -> Vec<u8> {
    let mut bytes = vec![u8::try_from(position).unwrap(); MAX_OBJECT + 1];
    bytes.extend_from_slice(payload);
    bytes
}

fn read(worker: &Worker, index: u64) -> Option<Vec<u8>> {
    let mut out = [0; MAX_OBJECT];
    match worker.get(index, &mut out).expect("no page is damaged by a killed server") {
        Page::Absent => None,
        Page::Same(word) => Some(word.to_le_bytes().repeat(512)),
        Page::Object { len, .. } => Some(out[..len].to_vec()),
        Page::Grouped => {
            let mut buffer = GroupBuffer::new();
            let found = worker.get_group(index, &mut buffer).expect("no group is damaged");
            Some(grouped(buffer.payload(), found.expect("it is in one").position))
        }
        Page::Backed => {
            let found = worker.read_back(index, &mut BackBuffer::new(), &mut out);
            match found.expect("no block is damaged") {
                Some(Page::Object { len, .. }) => Some(out[..len].to_vec()),
                other => panic!("page {index}: {other:?}"),
            }
        }
    }
}

fn options() -> Options {
    limited(0)
}

fn limited(mem_limit: u64) -> Options {
    Options { mem_limit, reserve: 0, ..Options::default() }
}

/// Serializes tests: a child inherits the process's open files, and with them the locks of other
/// tests' stores.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn back(disk: &OwnedFd) -> FileDisk {
    FileDisk::inherit(disk.as_fd()).unwrap()
}

/// Runs `child` in a process of its own; returns its signal, if one killed it.
pub(crate) fn killed(child: impl FnOnce()) -> Option<i32> {
    // SAFETY: the child uses only what the forking thread owns, and the C library's allocator,
    // which may be used after a fork; it exits by `_exit`.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "no child");
    if pid == 0 {
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).is_ok();
        // SAFETY: ends this process without returning.
        unsafe { libc::_exit(i32::from(!done)) };
    }
    let (_, status) =
        waitpid(Pid::from_raw(pid), WaitOptions::empty()).expect("our child").expect("it ended");
    let signal = status.terminating_signal();
    assert!(signal.is_some() || status.exit_status() == Some(0), "the child failed: {status:?}");
    signal
}
