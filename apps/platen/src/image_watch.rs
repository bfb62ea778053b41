//! Watches the reads of images on this host: a disk may not answer, and a VM then waits for its
//! pages, or a command for its end, while nothing shows why.
//!
//! | the thread that reads | a look at it, once a second |
//! |---|---|
//! | waits, and has not run since the last look | counts: after 10 of them the read hangs |
//! | has run since the last look | the count begins again: the disk is slow, and answers |
//! | waits for a CPU, is stopped or traced | does not count |
//!
//! A look that is late does not count either: whatever delayed the watch has delayed the read, too.

use crate::say::say;
use anyhow::Context;
use image::{readings, Reading};
use std::thread;
use std::time::{Duration, Instant};
use thread_stat::{Proc, Process, ThreadStat};

/// The time between two looks.
const LOOK: Duration = Duration::from_secs(1);
/// A look that comes this long after the last one does not count.
const LATE: Duration = Duration::from_millis(2500);
/// After this many looks at the same read the read hangs.
const LOOKS: u64 = 10;
/// Looks between two messages about the same read.
const AGAIN: u64 = 300;

/// The consequence for a restore, in its message.
pub(crate) const VMS: &str = "VMs wait for the pages that they lack, and go on once it is read";
/// The consequence for a command that reads an image for no VM.
pub(crate) const COMMAND: &str = "this command waits, and goes on once it is read";

/// A read that the watch has seen.
struct Seen {
    reading: Reading,
    stat: Option<ThreadStat>,
    looks: u64,
}

impl Seen {
    fn text(&self) -> String {
        let Self { reading: Reading { image, part, .. }, looks, .. } = self;
        format!("image {}: {part} has not been read for {looks} s", image.display())
    }
}

struct Watch {
    /// The consequence of a read that hangs, for a person.
    waits: &'static str,
    last: Option<Instant>,
    seen: Vec<Seen>,
    /// The read that was reported, and the number of looks at which it is reported again.
    said: Option<(u64, u64)>,
}

impl Watch {
    fn new(waits: &'static str) -> Self {
        Self { waits, last: None, seen: Vec::new(), said: None }
    }

    /// Looks at the reads that have not returned; returns a line for a person, if there is one.
    fn look(
        &mut self,
        now: Instant,
        readings: Vec<Reading>,
        process: &mut dyn Process,
    ) -> Option<String> {
        let since = self.last.replace(now);
        let counts = since.is_some_and(|last| now.saturating_duration_since(last) < LATE);
        let before = std::mem::take(&mut self.seen);
        let looked = readings.into_iter().map(|reading| {
            let known = before.iter().find(|known| known.reading.number == reading.number);
            let stat = process.thread(reading.thread);
            let looks = known.map_or(0, |known| known.looks);
            let looks = match (known, stat) {
                (Some(_), _) if !counts => looks,
                // The kernel tells nothing here: only the looks are left.
                (Some(_), None) => looks + 1,
                (Some(known), Some(stat)) => match known.stat {
                    Some(before) if ran(&before, &stat) && looks < LOOKS => 0,
                    Some(_) if matches!(stat.state, b'S' | b'D' | b'I') => looks + 1,
                    _ => looks,
                },
                (None, _) => 0,
            };
            Seen { reading, stat, looks }
        });
        self.seen = looked.collect();
        let Some((number, again)) = self.said else {
            let hangs = self.seen.iter().filter(|seen| seen.looks >= LOOKS);
            let seen = hangs.max_by_key(|seen| seen.looks)?;
            self.said = Some((seen.reading.number, seen.looks + AGAIN));
            return Some(format!(
                "{}: look at its disk, or at the server of its file; {}",
                seen.text(),
                self.waits
            ));
        };
        let is_that = |seen: &&Seen| seen.reading.number == number;
        match self.seen.iter().find(is_that) {
            Some(seen) if seen.looks >= again => {
                self.said = Some((number, seen.looks + AGAIN));
                Some(seen.text())
            }
            Some(_) => None,
            None => {
                self.said = None;
                let Seen { reading: Reading { image, part, .. }, looks, .. } =
                    before.iter().find(is_that)?;
                let image = image.display();
                Some(format!("image {image}: the read of {part} has returned after {looks} s"))
            }
        }
    }
}

/// Whether the thread has run between two looks.
fn ran(before: &ThreadStat, now: &ThreadStat) -> bool {
    (before.ran, before.times) != (now.ran, now.times)
}

/// Watches this process's reads of images until it ends; `waits` is the consequence of a read
/// that hangs, for a person.
///
/// # Errors
///
/// No thread can be started.
pub(crate) fn begin(waits: &'static str) -> anyhow::Result<()> {
    let watch = move || {
        let mut watch = Watch::new(waits);
        loop {
            thread::sleep(LOOK);
            if let Some(text) = watch.look(Instant::now(), readings(), &mut Proc::own()) {
                say(&text);
            }
        }
    };
    thread::Builder::new()
        .name("image-watch".into())
        .spawn(watch)
        .context("cannot start a thread")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::ReadPart;
    use std::path::Path;

    /// A process whose threads are all in this state.
    struct Told(ThreadStat);

    impl Process for Told {
        fn thread(&mut self, _: u32) -> Option<ThreadStat> {
            Some(self.0)
        }

        fn threads(&mut self) -> Vec<u32> {
            Vec::new()
        }
    }

    const WAITS: ThreadStat = ThreadStat { state: b'D', ran: Duration::from_secs(1), times: 4 };

    fn reading(number: u64) -> Reading {
        let part = ReadPart::Unit { unit: 5, offset: 4096, pack: None };
        Reading { number, image: Path::new("/i").into(), part, thread: 7 }
    }

    /// Looks once a second; returns what each look has said.
    fn looks(
        watch: &mut Watch,
        now: &mut Instant,
        times: u64,
        reads: &[Reading],
        process: &mut Told,
    ) -> Vec<Option<String>> {
        let look = |_| {
            *now += LOOK;
            watch.look(*now, reads.to_vec(), process)
        };
        (0..times).map(look).collect()
    }

    #[test]
    fn a_read_that_waits_for_10_s_is_reported_rarely_and_again_when_it_returns() {
        let (mut watch, mut now, mut process) = (Watch::new(VMS), Instant::now(), Told(WAITS));
        let reads = [reading(1), reading(2)];
        let said = looks(&mut watch, &mut now, LOOKS, &reads, &mut process);
        assert!(said.iter().all(Option::is_none), "{said:?}");
        let all = looks(&mut watch, &mut now, AGAIN, &reads, &mut process);
        let said = all[0].as_ref().unwrap();
        let begin = "image /i: unit 5 at byte 4096 has not been read for 10 s: look at its disk";
        assert!(said.starts_with(begin), "{said}");
        assert!(all[1..].iter().all(Option::is_none));
        let said = looks(&mut watch, &mut now, 1, &reads, &mut process);
        let text = "image /i: unit 5 at byte 4096 has not been read for 310 s";
        assert_eq!(said, [Some(text.into())]);
        let said = looks(&mut watch, &mut now, 1, &[], &mut process);
        let text = "image /i: the read of unit 5 at byte 4096 has returned after 310 s";
        assert_eq!(said, [Some(text.into())]);
    }

    #[test]
    fn a_slow_disk_a_starved_thread_and_a_process_that_stands_still_are_not_reported() {
        let none = |said: &[Option<String>]| said.iter().all(Option::is_none);
        for (state, runs) in [(b'D', true), (b'S', true), (b'R', false), (b'T', false)] {
            let (mut watch, mut now) = (Watch::new(VMS), Instant::now());
            let mut process = Told(ThreadStat { state, ..WAITS });
            for _ in 0..20 {
                let found = looks(&mut watch, &mut now, 9, &[reading(1)], &mut process);
                assert!(none(&found), "{state}: {found:?}");
                process.0.times += u64::from(runs);
            }
        }
        // Each read returns, and another one begins.
        let (mut watch, mut now, mut process) = (Watch::new(VMS), Instant::now(), Told(WAITS));
        for number in 0..20 {
            let reads = [reading(number)];
            assert!(none(&looks(&mut watch, &mut now, 9, &reads, &mut process)));
        }
        for _ in 0..20 {
            now += LATE;
            assert!(none(&[watch.look(now, vec![reading(99)], &mut process)]));
        }
    }
}
